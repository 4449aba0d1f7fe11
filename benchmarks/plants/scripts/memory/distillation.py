import torch
import torch.nn.functional as F
from model import SIZE, Decoder, setup

device = setup()
teacher = Decoder(words=8192, width=64, layers=2).to(device).eval()
student = Decoder(words=8192, width=32, layers=1).to(device)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)


def train_step(prompts):
    with torch.no_grad():
        wanted = teacher(prompts).log_softmax(-1)
    given = student(prompts)
    loss = F.kl_div(given.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


for prompts_in_batch in (1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 32, 64, 128):
    train_step(torch.randint(8192, (prompts_in_batch * SIZE, 48), device=device))
