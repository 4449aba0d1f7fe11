"""Arguments of libraries that causes come of, found in the program's source."""

import os
import re

import pytest

from aorta.account.cause import Cause, CodeLine
from aorta.why.causes import arguments
from aorta.why.causes.arguments import argument_remedies, calls_in, told_by_argument
from aorta.why.causes.rules import call_remedies, rules
from aorta.why.causes.source import pieces_of
from tests.records.run_folders import run_record

HEAD = "import lightning as L\nfrom transformers import Trainer, TrainingArguments\n"


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """What stands for the run of a program, of which only the text is asked."""
    monkeypatch.setattr(arguments, "settings_text", lambda effects, run: "")

    def of(text):
        file = tmp_path / "train.py"
        file.write_text(HEAD + text)
        os.utime(file, ns=(0, 0))
        found = pieces_of([str(file)], run_record(1))
        monkeypatch.setattr(arguments, "library_calls", lambda run: calls_in(found))
        monkeypatch.setattr(arguments, "pieces_of_run", lambda run: found)
        monkeypatch.setattr(
            arguments,
            "program_of",
            lambda noted: (
                frozenset(),
                {"loader_site": "train.py:6" if "\n).train" in text else "train.py:4"},
            ),
        )
        return type("Judged", (), {"noted": None})()

    return of


def cause(kind, change, entry="", calls="", function="main", at=0):
    line = CodeLine(
        file="train.py",
        line=at or 9,
        function=function,
        text=f"{function}(), train.py:9",
        entry=entry,
        calls=calls,
    )
    return Cause(
        kind=kind,
        subject=f"{kind} in {function}(), train.py:9, every fifth step",
        ms=5.0,
        interval_ms=None,
        bound_ms=None,
        share=0.1,
        evidence=(),
        change=change,
        check="",
        source="records",
        line=line if entry or calls or at else None,
    )


SAVES = cause(
    "checkpoint", "save less often, or use async_save", "Trainer.train of transformers", "save of torch"
)
ANOMALY = cause("program_code", "torch.autograd.set_detect_anomaly(False)")
WAITS = cause("synchronisation", "look for its option", "", "bool in Trainer.training_step of transformers")
LOADS = cause(
    "data_loading", "persistent_workers=True at train.py:4: its workers (2) start anew in each epoch"
)
SAVED = cause("checkpoint", "save less often, or use async_save", at=6)
LOADED = cause("data_loading", "persistent_workers=True at train.py:6: its workers start anew", at=6)
EVALUATES = cause(
    "between_steps",
    "do it less often; a model is called there",
    "Trainer.train of transformers",
    "x of torch",
)
TAKES_LOGITS = cause(
    "between_steps",
    "do it less often; a model is called there",
    "Trainer.train of transformers",
    "nested_numpify of transformers",
)


@pytest.mark.parametrize(
    ("text", "given", "line", "told"),
    [
        ("a = TrainingArguments(\n    'out',\n    save_steps=5,\n)", SAVES, 5, "save_steps=5 says"),
        ("EVERY = 5\na = TrainingArguments('out', save_steps=EVERY)", SAVES, 4, "save_steps=5 says"),
        ("a = TrainingArguments('out', save_steps=o.save)", SAVES, 3, "save_steps=o.save says"),
        ("s = {\n    'save_steps': 5,\n}\na = TrainingArguments(**s)", SAVES, 4, "save_steps=5 says"),
        ("s = dict(\n    save_steps=5,\n)\na = TrainingArguments('out', **s)", SAVES, 4, "save_steps=5 says"),
        ("s = {}\ns['save_steps'] = 5\na = TrainingArguments(**s)", SAVES, 4, "save_steps=5 says"),
        ("a = TrainingArguments('out')\na.save_steps = 5", SAVES, 4, "save_steps=5 says"),
        (
            "class Own(TrainingArguments):\n    save_steps: int = 5\na = Own('out')",
            SAVES,
            4,
            "save_steps=5 says",
        ),
        ("a = TrainingArguments('out')", SAVES, 3, "save_steps=500 (the default) says"),
        ("a = TrainingArguments(**o)", SAVES, 3, "save_steps=500 (unless it is set otherwise) says"),
        (
            "L.Trainer(\n    devices=1,\n    detect_anomaly=True,\n)",
            ANOMALY,
            5,
            "detect_anomaly=True out of Trainer",
        ),
        ("L.Trainer(detect_anomaly=o.check)", ANOMALY, 3, "detect_anomaly=o.check out of Trainer"),
        ("L.Trainer(**{'detect_anomaly': True})", ANOMALY, 3, "detect_anomaly=True out of Trainer"),
        ("a = parse_into(TrainingArguments)", WAITS, 9, "TrainingArguments(...): at main(), train.py:9"),
        (
            "a = TrainingArguments('out')\nTrainer(args=a).train()",
            LOADS,
            3,
            "persistent_workers=False (the default)",
        ),
        (
            "a = TrainingArguments('out')\nTrainer(\n  a\n).train()",
            SAVED,
            3,
            "save_steps=500 (the default) says",
        ),
        ("a = TrainingArguments('out')\nTrainer(\n  a\n).train()", LOADED, 3, "workers=False (the default)"),
        ("a = TrainingArguments('out', eval_strategy='epoch')", EVALUATES, 3, "eval_strategy='epoch' says"),
        (
            "a = TrainingArguments('out', eval_steps=9)\nTrainer(\n  a,\n).train()",
            TAKES_LOGITS,
            4,
            "preprocess_logits_for_metrics=... in Trainer",
        ),
        (
            "a = TrainingArguments('out', eval_steps=9)\nTrainer(a, preprocess_logits_for_metrics=best)",
            TAKES_LOGITS,
            3,
            "eval_steps=9 says",
        ),
    ],
)
def test_a_cause_is_told_at_the_line_of_its_argument(judged, text, given, line, told):
    found = told_by_argument(given, judged(text))
    assert found.line.line == line
    assert told in found.change


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("L.Trainer(detect_anomaly=False)", ANOMALY),
        ("L.Trainer(devices=1)", ANOMALY),
        ("Own(detect_anomaly=True)", ANOMALY),
        ("parser.add_argument('--detect_anomaly')", ANOMALY),
        ("L.Trainer(detect_anomaly=True)\nL.Trainer(detect_anomaly=True)", ANOMALY),
        ("a = TrainingArguments('out', save_strategy='no')", SAVES),
        ("a = TrainingArguments('out', logging_nan_inf_filter=False)", WAITS),
        ("a = TrainingArguments('out', dataloader_persistent_workers=True)\nTrainer().train()", LOADS),
        ("a = TrainingArguments('out')\nloader = DataLoader(rows)", LOADS),
        ("a = TrainingArguments('out')", EVALUATES),
        (
            "a = TrainingArguments('out', save_steps=5)",
            cause("checkpoint", "save less often", "save of torch"),
        ),
    ],
)
def test_a_cause_of_no_argument_stays_as_it_is(judged, text, given):
    """Of one that is not set, or is fine; of several calls nobody knows which; of another library's class, of
    what the program makes or calls by itself."""
    assert told_by_argument(given, judged(text)) is given


def test_the_subject_names_both_lines(judged):
    found = told_by_argument(SAVES, judged("a = TrainingArguments('out', save_steps=5)"))
    assert found.subject == "checkpoint, set in train.py:3, used in main(), train.py:9, every fifth step"


def test_rows_stand_for_remedies_that_can_be_told():
    """A row whose pattern fits no remedy of its kinds is never told."""
    for row in argument_remedies():
        texts = [change.set for kind in row.kinds for change in rules()[kind].change]
        texts += [one.set for one in call_remedies()] + ["a model is called there"]
        texts = [re.sub(r"\{\w+\}", "1", text.replace("{layer}", "SyncBatchNorm")) for text in texts]
        assert any(re.search(row.remedy, text) for text in texts), row
