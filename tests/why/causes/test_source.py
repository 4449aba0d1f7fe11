"""Where what a cause is of was made, by the source of a program that is written here."""

import ast
import os
import time
from types import SimpleNamespace

import msgspec
import pytest

from aorta.account.cause import CodeLine
from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.records.files import sites_name
from aorta.records.schema import CallSite, CallSites
from aorta.why.causes import rank, source
from aorta.why.causes.rules import rules
from aorta.why.causes.source import (
    asks,
    gives_rows,
    goes_through,
    hands_numbers,
    indexes_alone,
    is_called_anew,
    is_of_sampler,
    pieces_of,
    rounds_around,
    sends_of,
    source_of,
)
from tests.why.causes.runs import causes, many_small, run_of, waited
from tests.why.causes.stacks import COMMON, TRAIN, write_stacks

BEGAN_NS = 10**18
BEGAN = SimpleNamespace(started_unix_ns=BEGAN_NS)
PROGRAM = """\
import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.pipelining import ScheduleGPipe
from torch.optim.lr_scheduler import LambdaLR
import reviews


class Ranker(nn.Module):
    def __init__(self):
        self.user, self.bias = nn.Embedding(500_000, 32), 0.0
        self.item = nn.Embedding(900_000, 32)
        self.word = nn.Embedding(900_000, 32)
        self.net = nn.Sequential(
            nn.Linear(32, 32),
            nn.ReLU(),
        )

    def forward(self, user, item):
        return self.net(self.item(item))


class Pretrained(nn.Module):
    def __init__(self):
        self.item = nn.Embedding(10, 10)


def fill(rows):
    width = 512
    ids = torch.zeros(len(rows), width)
    mask = torch.zeros(len(rows), width)
    return ids, mask


def main(rank, world):
    torch.autograd.set_detect_anomaly(True)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(Ranker())
    net = FSDP(net)
    device = torch.device(f"cuda:{[0, 1][rank % 2]}")
    loader = torch.utils.data.DataLoader(reviews.part(rank, world), collate_fn=fill)
    schedule = ScheduleGPipe(net, n_microbatches=1)
    LambdaLR(None, None)
    loss = net(1)
"""
REVIEWS = """\
def part(rank, world):
    rows = [*range(1000)]
    share = len(rows) // world
    return rows[rank * share : (rank + 1) * share]
"""


def pieces(tmp_path, **sources):
    for name, text in {"train": PROGRAM, "reviews": REVIEWS, **sources}.items():
        (tmp_path / f"{name}.py").write_text(text)
        os.utime(tmp_path / f"{name}.py", ns=(0, BEGAN_NS))
    return pieces_of([str(tmp_path / "train.py")], BEGAN)


def at(tmp_path, line, function):
    return CodeLine(file=str(tmp_path / "train.py"), line=line, function=function, text="")


def made_in(found, kind, key, line):
    return source.made_in(found, key, rules()[kind].begins(key), line)


@pytest.mark.parametrize(
    ("kind", "key", "told"),
    [
        ("small_messages", "SyncBatchNorm", "main(), train.py:37"),
        ("small_units", "any", "main(), train.py:38"),
        ("bubble", "any", "main(), train.py:41"),
        ("program_code", "anomaly", "main(), train.py:36"),
        ("compute", "padding", "fill(), train.py:30"),
        ("imbalance", "batches", "part(), reviews.py:4"),
    ],
)
def test_what_a_cause_is_of_is_found_where_it_is_made(tmp_path, kind, key, told):
    assert made_in(pieces(tmp_path), kind, key, None) == told


def test_of_several_tables_the_one_is_meant_that_the_line_looks_up(tmp_path):
    made = made_in(pieces(tmp_path), "compute", "rows", at(tmp_path, 20, "Ranker.forward"))
    assert made == "Ranker.__init__(), train.py:12"


def test_of_more_lines_than_can_be_looked_at_none_is_told(tmp_path):
    assert made_in(pieces(tmp_path), "compute", "rows", None) == ""


def test_two_lines_are_both_told(tmp_path):
    program = "import torch\ntable = torch.nn.Embedding(9, 9)\nother = torch.nn.EmbeddingBag(9, 9)\n"
    made = made_in(pieces(tmp_path, train=program), "compute", "rows", None)
    assert made == "train.py:2 and train.py:3"


def test_a_module_is_made_where_what_the_line_calls_is_assigned(tmp_path):
    found = pieces(tmp_path)
    assert (
        made_in(found, "compute", "unread", at(tmp_path, 43, "main")) == "main(), train.py:37 and train.py:38"
    )
    in_forward = made_in(found, "compute", "unread", at(tmp_path, 20, "Ranker.forward"))
    assert in_forward == "Ranker.__init__(), train.py:12 and train.py:14"
    assert made_in(found, "compute", "unread", None) == ""


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("Pretrained", "build(), train.py:47"),
        ("Ranker.net", "Ranker.__init__(), train.py:14"),
        ("Linear", ""),
    ],
)
def test_a_module_of_the_program_is_made_where_its_class_or_attribute_is(tmp_path, module, told):
    found = pieces(tmp_path, train=PROGRAM + "\n\ndef build():\n    return Pretrained()\n")
    assert source.module_made_in(module, found) == told


FILLING = """\
class Collate:
    def __call__(self, rows):
        return torch.full((len(rows), 512), 0)

def joined(width, rows):
    return [row + [0] * (width - len(row)) for row in rows]

class Rows(Dataset):
    def __getitem__(self, index):
        sample = self.rows[index]
        return F.pad(sample, (0, 512 - len(sample)))

"""


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        ("DataLoader(rows, collate_fn=Collate())", "Collate.__call__(), train.py:3"),
        ("DataLoader(rows, collate_fn=partial(joined, 512))", "joined(), train.py:6"),
        ("collate = Collate()\nDataLoader(rows, collate_fn=collate)", "Collate.__call__(), train.py:3"),
        ("DataLoader(Rows(), 8)", "Rows.__getitem__(), train.py:11"),
        ("DataLoader(Rows(), 8, collate_fn=libraries.own)", ""),
    ],
)
def test_rows_are_filled_up_by_what_makes_batches_or_else_samples(tmp_path, loader, told):
    assert made_in(pieces(tmp_path, train=FILLING + loader + "\n"), "compute", "padding", None) == told


def test_the_argument_that_fills_rows_to_one_length_is_the_line(tmp_path):
    program = 'rows = tokenizer(\n    texts,\n    padding="max_length",\n)\n'
    assert made_in(pieces(tmp_path, train=program), "compute", "padding", None) == "train.py:3"
    assert (
        made_in(pieces(tmp_path, train="rows = tokenizer(texts, padding=True)\n"), "compute", "padding", None)
        == ""
    )


def test_the_line_that_runs_is_not_told_again(tmp_path):
    assert made_in(pieces(tmp_path), "bubble", "any", at(tmp_path, 41, "main")) == ""


@pytest.mark.parametrize(
    ("line", "deals"),
    [
        ("sampler = DistributedSampler(rows)", True),
        ("own = list(range(rank * share, (rank + 1) * share))", True),
        ("own = np.arange(rank * share, (rank + 1) * share)", True),
        ("positions = torch.arange(rank * share, (rank + 1) * share)", False),
        ("own = [rows[i] for i in range(dist.get_rank(), len(rows), world)]", True),
        ("later = [*range(rank + 1, 9)]", False),
        ("both = zip(range(2, 9), [rank])", False),
    ],
)
@pytest.mark.parametrize(("kind", "key"), [("imbalance", "batches"), ("late_rank", "works")])
def test_a_part_of_the_rows_is_dealt_out(tmp_path, kind, key, line, deals):
    program = f"from torch.utils.data import DistributedSampler\n{line}\n"
    assert made_in(pieces(tmp_path, train=program), kind, key, None) == ("train.py:2" if deals else "")


@pytest.mark.parametrize(
    ("line", "kind", "deals"),
    [
        ("batches = LengthBuckets(lengths, 32, seed=SEED + rank)", "imbalance", True),
        ("batches = LengthBuckets(lengths, 32, seed=SEED)", "imbalance", False),
        ("torch.manual_seed(SEED + rank)", "imbalance", False),
        ("batches = LengthBuckets(lengths, 32, seed=SEED + rank)", "late_rank", False),
    ],
)
def test_batches_of_each_rank_may_come_in_an_order_of_its_own(tmp_path, line, kind, deals):
    """Where they differ in size, which makes other ranks late in turn."""
    key = "batches" if kind == "imbalance" else "works"
    assert made_in(pieces(tmp_path, train=f"import torch\n{line}\n"), kind, key, None) == (
        "train.py:2" if deals else ""
    )


def test_lines_that_ask_for_fp64(tmp_path):
    program = "import torch\nTYPE = torch.float64\nx = [].double()\nnumpy.float64(3)\n"
    assert (
        made_in(pieces(tmp_path, train=program), "compute", "all_fp64", None) == "train.py:2 and train.py:3"
    )


def record(seconds=60):
    """Of a run that begins so long from now."""
    return SimpleNamespace(started_unix_ns=time.time_ns() + int(seconds * 1e9))


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


def test_a_file_that_was_written_since_is_not_read(program):
    assert source_of(str(program), record()) is not None
    assert source_of(str(program), record(seconds=-60)) is None


@pytest.mark.parametrize("make", [
    lambda file: file.write_text("def ("),
    lambda file: file.write_bytes(b"\0"),
    lambda file: file.write_text("a\n" * (1 << 20)),
    lambda file: (file.unlink(), os.mkfifo(file)),
    lambda file: file.unlink(),
], ids=["no-python", "binary", "large", "a-pipe", "gone"])  # fmt: skip
def test_what_is_no_program_is_left_out(program, make):
    make(program)
    assert source_of(str(program), record()) is None


@pytest.mark.parametrize(("text", "found"), [
    ("new = {name: old.state_dict()[name] for name, value in model.state_dict().items()}", True),
    ("for name, value in model.named_parameters():\n    value += old.state_dict()[name]", True),
    ("new = {name: one.state_dict() for name, one in models.items()}", False),  # of the entry
    ("new = {name: 3 for name in model.state_dict().items()}", False),  # once
    ("for step in range(9):\n    save(model.state_dict())", False),  # which has the steps
    ("for name, rate in rates.items():\n    pass\nsave(model.state_dict())", False),
])  # fmt: skip
def test_a_state_that_a_loop_asks_for_anew(text, found):
    assert is_called_anew(ast.parse(text), text.count("\n") + 1, "state_dict") == found


STEPS = "for x, y in loader:\n    loss(x, y).backward()\n"


@pytest.mark.parametrize(("text", "found"), [
    (STEPS + "    for a, b in zip(x, y):\n        counts[a, b] += 1", "entries"),
    (STEPS + "    right = sum(a == b for a, b in zip(x, y))", "entries"),
    (STEPS + "    while left:\n        left = left[1:]", "entries"),
    (STEPS + "    for p, v in zip(model.parameters(), means):\n        v.add_(p.grad)", "tensors"),
    (STEPS + "    for p in model.parameters():\n        for q in p:\n            q /= q.norm()", "nested"),
    (STEPS + "    for p in range(3):\n        total += x[p]", "entries"),
    (STEPS + "    for _ in range(3):\n        u = x @ u", "again"),
    (STEPS + "    for _ in range(3):\n        u = draw()\n        rows.append(u)", "entries"),
    (STEPS + "    for _ in range(3):\n        total += draw()", "entries"),
    (STEPS + "    for _ in range(3):\n        total = total + draw()", "entries"),
    (STEPS + "    for _ in range(3):\n        u = u + act(u)", "again"),
    (STEPS + "    for p in range(3):\n        u = x[p] @ u", "entries"),
    (STEPS + "    counts[x, y] += 1", ""),  # the loop of steps
    (STEPS + "    while left:\n        left = world.step(left)", "entries"),
    ("for x in rows:\n    train.step(x)", ""),
    ("for x in rows:\n    pass\nlog(rows)", ""),
])  # fmt: skip
def test_what_a_loop_within_a_step_goes_through(text, found):
    assert goes_through(ast.parse(text), text.count("\n") + 1) == found


@pytest.mark.parametrize(("base", "is_one"), [
    ("Sampler", True), ("data.BatchSampler", True), ("IterableDataset", False), ("", False),
])  # fmt: skip
def test_a_sampler_of_the_program(base, is_one):
    tree = ast.parse(f"class Balanced({base}):\n    def __iter__(self):\n        yield 1")
    assert is_of_sampler(tree, "Balanced.__iter__") == is_one
    assert not is_of_sampler(tree, "Others.__iter__")


@pytest.mark.parametrize(("text", "found"), [
    ("assert not torch.isnan(x).any()", True),
    ("bad = x.isnan().any()", True),
    ("if torch.isfinite(x):\n    pass", True),
    ("bad = torch.any(torch.isnan(x))", True),
    ("x = x[~torch.isnan(x).any(-1)]", False),
    ("x = x[torch.all(torch.isfinite(x), dim=1)]", False),
    ("x = torch.where(torch.isnan(x), 0, x)", False),
    ("if y:\n    x = x * ~torch.isnan(x)", False),
])  # fmt: skip
def test_a_line_that_decides_by_what_it_computes(text, found):
    line = 1 if found else text.count("\n") + 1
    assert asks(ast.parse(text), line) == found


ROUNDS = "for t in range(9):\n            act(see())"


@pytest.mark.parametrize(("text", "line"), [
    (STEPS + f"    with torch.no_grad():\n        {ROUNDS}", 4),
    (STEPS + "    for t in range(9):\n        with torch.no_grad():\n            act(see())", 3),
    (STEPS + f"    if t:\n        {ROUNDS}", None),  # maybe for gradients
    (STEPS + "    with torch.no_grad():\n        for x in held_out:\n            act(x)", None),
    ("for t in range(9):\n    loss().backward()\n    with no_grad():\n        act()", None),
    (f"@torch.inference_mode()\ndef collect():\n    if 1:\n        {ROUNDS}", 4),
])  # fmt: skip
def test_rounds_without_gradients(text, line):
    found = rounds_around(ast.parse(text), text.count("\n") + 1)
    assert (found and found.lineno) == line


@pytest.mark.parametrize(("text", "is_alone"), [
    ("x, y = data[chosen], labels[chosen]", True),
    ("x = data[chosen].float()", False),
    ("x = data[3], data[3:9]", False),
    ("total += x", False),
])  # fmt: skip
def test_a_line_that_indexes_and_calls_nothing(text, is_alone):
    assert indexes_alone(ast.parse(text), 1) == is_alone


@pytest.mark.parametrize(("body", "is_row"), [
    ("return self.x[i], torch.from_numpy(self.y[i]).float()", True),
    ("j = self.order[i]\n        return {'x': self.x[j, :3], 'y': int(self.y[i])}", True),
    ("return self.x[i : i + 96]", False),  # many indices are no pieces
    ("return self.x[i, :, : i + 1]", False),
    ("text, label = self.rows[i]\n        return text, label", False),
    ("return torch.stack([self.x[j] for j in self.near[i]])", False),
    ("return self.turn(self.x[i])", False),
    ("return self.x[i] if self.x[i, 0] else self.y[i]", False),
    ("return torch.randn(8)", False),
])  # fmt: skip
def test_a_data_set_that_only_indexes(body, is_row):
    text = f"class Rows(Dataset):\n    def __getitem__(self, i):\n        {body}\n"
    assert gives_rows(ast.parse(text), "Rows") == is_row
    assert not gives_rows(ast.parse(text), "Others")


SENT = "parts = [None] * 4\ndist.all_gather_object(parts, zip(scores.tolist(), y))\n"


@pytest.mark.parametrize(("text", "is_of_it"), [
    (SENT + "history.extend(torch.tensor(p) for p in parts)", True),
    (SENT + "found = torch.cat(others)", False),
    (SENT + "loss = criterion(scores, y)", False),  # of which it is made, and which training needs
    (SENT.replace("all_gather_object", "all_gather") + "found = torch.cat(parts)", False),
    ("\ndist.gather_object(rows, object_gather_list=parts)\nfound = [one for one in parts]", True),
])  # fmt: skip
def test_a_line_that_uses_what_objects_are_sent_as(text, is_of_it):
    assert sends_of(ast.parse(text), 3, 2) == is_of_it


@pytest.mark.parametrize(("text", "function", "is_handing"), [
    ("scale = torch.tensor(1.0 / step, device=device)", "torch.tensor", True),
    ("x = x + torch.arange(x.shape[1]).to(x.device)", "to", True),
    ("mask = torch.ones(n, n).cuda()", "Tensor.cuda", True),
    ("rows = torch.tensor(rows).to(device)", "to", True),
    ("rows = torch.tensor(rows).to(device)", "torch.tensor", False),  # looks at the values of a list
    ("rows = torch.tensor(rows)", "torch.tensor", False),
    ("rows = torch.tensor(rows, device='cpu')", "torch.tensor", False),
    ("x = x + torch.arange(n, device=device).to(dtype)", "to", False),
    ("x, y = x.to(device), y.to(device)", "to", False),
    ("x = torch.full((n,), 3.0, device=device)", "torch.full", False),
])  # fmt: skip
def test_a_line_that_hands_numbers_to_a_device(text, function, is_handing):
    assert hands_numbers(ast.parse(text), 1, function) == is_handing


def told(folder):
    return causes(judge(load_run(folder, "run")))[0]


def test_the_line_to_change_comes_before_the_one_that_runs(tmp_path, monkeypatch):
    """Layers of SyncBatchNorm send in line 20 of a program that makes them in line 37 of another file."""

    (tmp_path / "run").mkdir()
    folder = run_of(tmp_path / "run", many_small)
    site = CallSite(
        op="all_reduce", moves="a tensor", file=TRAIN, line=20, function="main", num_calls=24, bytes=1 << 17,
        is_program=True,
    )  # fmt: skip
    for rank_number in (0, 1):
        told_sites = msgspec.json.encode(CallSites(num_steps=2, sites=[site]))
        (folder / sites_name(rank_number)).write_bytes(told_sites)
        write_stacks(folder, rank_number, COMMON, ("norm", "forward", "runs", 18.0))
    before = told(folder)
    monkeypatch.setattr(rank, "pieces_of_run", lambda _: pieces(tmp_path))
    cause, made = told(folder), "main(), train.py:37"
    assert before.subject.endswith(" in main(), train.py:20")
    assert cause.subject.endswith(f", of SyncBatchNorm made in {made}, used in main(), train.py:20")
    assert cause.change == f"{before.change}: at {made}"


def test_of_a_late_rank_is_told_where_it_gets_its_part(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    folder = run_of(tmp_path / "run", lambda *step: waited(8.0, *step))
    monkeypatch.setattr(rank, "pieces_of_run", lambda _: pieces(tmp_path))
    cause = told(folder)
    place = "part(), reviews.py:4"
    assert cause.subject == f"waiting for rank {cause.rank}, whose part is dealt out in {place}"
    assert cause.change.endswith(f": at {place}")


@pytest.mark.filterwarnings("error")
def test_what_python_warns_of_in_the_program_is_not_said_again(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("text = '\\d'\n")
    os.utime(file, ns=(BEGAN_NS, BEGAN_NS))
    assert source_of(str(file), BEGAN) is not None
