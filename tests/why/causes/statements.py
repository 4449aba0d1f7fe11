"""Reads what is said of a run from outside, and what of it cannot be: from the printed text alone."""

import re

NUMBER = r"[\d,]*\.?\d+"


def number(text):
    return float(text.replace(",", ""))


def headlines(text):
    """'data loading on rank 1: 20.1 ms a step, 38 % ...', in order, of a report or of `aorta why`."""
    return [line.partition(". ")[2] for line in text.splitlines() if re.match(r"\d\. ", line)]


def title(text):
    return re.search(r"^(.*(?: takes | was not measured).*)$", text, re.M)[1]


def table(text):
    """Name and ms of the rows of the account in a report; the last one is the step."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if re.search(r"\bmean +of step\b", line))
    rows = []
    for line in lines[first + 1 :]:
        found = re.match(rf"([a-z][a-z -]*?) +<?({NUMBER}) ms", line)
        if found is None:
            break
        rows.append((found[1], number(found[2])))
        if found[1] == "step":
            break
    return rows


def faults(text, longest_ms):
    """What a text on steps that are at most so long cannot say."""
    step = re.search(rf"takes ({NUMBER}) ms", text)
    step_ms = number(step[1]) if step else longest_ms
    for line in headlines(text):
        ms = re.search(rf": ({NUMBER}) ms a step", line)
        if ms and number(ms[1]) > 1.006 * step_ms:
            yield f"{line}: longer than the step"
        share = re.search(r", (\d+) %", line)
        if share and int(share[1]) > 100:
            yield f"{line}: more than all"
        interval = re.search(rf"\[(-?{NUMBER}), (-?{NUMBER})\]", line)
        if interval and ms:
            low, high = map(float, (interval[1].replace(",", ""), interval[2].replace(",", "")))
            if low <= 0 or not 0.994 * low <= number(ms[1]) <= 1.006 * high:
                yield f"{line}: the interval"
        bound = re.search(rf"takes at least ({NUMBER}) ms", line)
        if bound and number(bound[1]) > 1.006 * step_ms:
            yield f"{line}: longer than the step"
    total = sum(number(found) for found in re.findall(rf"^\d\. [^;]*?: ({NUMBER}) ms a step", text, re.M))
    if total > 1.01 * step_ms:
        yield f"causes of {total} ms in a step of {step_ms}"
    for found in re.findall(rf"waits? ({NUMBER}) ms a step", text):
        if number(found) > 1.006 * step_ms:
            yield f"a wait of {found} ms"
    if re.search(r"step None|\bnan\b|\binf\b", text):
        yield "no number"
    if "Cannot tell" in text:
        yield text[text.index("Cannot tell") :].partition("\n")[0]
