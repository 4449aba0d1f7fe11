import pytest

from aorta.config.load import load_config
from aorta.config.structs import Config
from aorta.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_an_empty_file_gives_the_defaults(file):
    assert load_config(file("")) == Config()


def test_an_empty_section_gives_its_defaults(file):
    assert load_config(file("training:\n")) == Config()


def test_a_file_holds_only_differences_from_its_base(file):
    file("training: {max_steps: 7, seed: 3}\noptimizer: {lr: 0.1}", "base.yaml")
    config = load_config(file("base: base.yaml\ntraining: {seed: 4}"))
    assert (config.training.max_steps, config.training.seed, config.optimizer.lr) == (7, 4, 0.1)


def test_later_overrides_win_over_earlier_ones_and_the_file(file):
    path = file("training: {max_steps: 7}")
    assert load_config(path, ["training.max_steps=8", "training.max_steps=9"]).training.max_steps == 9


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optimizer.lr=1e-3", "optimizer", "lr", 1e-3),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("profiling.enabled=true", "profiling", "enabled", True),
        ("training.max_steps=null", "training", "max_steps", None),
        ("recording.kernels=off", "recording", "kernels", "off"),
        ("recording.overhead=off", "recording", "overhead", "off"),
        ("optimizer.betas=[0.8, 0.9]", "optimizer", "betas", (0.8, 0.9)),
        ("training.output_dir=a=b", "training", "output_dir", "a=b"),
    ],
)
def test_overrides_are_typed(file, override, section, key, value):
    config = load_config(file("training: {max_steps: 7}"), [override])
    assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "training.grad_acum_steps=3",
            "training.grad_acum_steps is not a setting, did you mean 'grad_accum_steps'?",
        ),
        ("trainng.max_steps=3", "trainng is not a setting, did you mean 'training'?"),
        ("training.lr=3", "training.lr is not a setting, did you mean 'optimizer.lr'?"),
        (
            "training.max_steps=abc",
            "training.max_steps must be an integer at least 1 or null, got 'abc'",
        ),
        ("training.max_steps=1.5", "training.max_steps must be an integer at least 1 or null, got 1.5"),
        ("training.batch_size=0", "training.batch_size must be an integer at least 1, got 0"),
        ("training.batch_size=null", "training.batch_size must be an integer at least 1, got null"),
        ("profiling.enabled=1", "profiling.enabled must be true or false, got 1"),
        ("training.precision=fp8", "training.precision must be one of bf16, fp16, fp32, tf32, got 'fp8'"),
        (
            "optimizer.betas=[0.9]",
            "optimizer.betas must be a list of 2, each a number at least 0 and below 1, got [0.9]",
        ),
        ("optimizer.lr=.inf", "optimizer.lr must be finite, got inf"),
        ("optimizer.lr=.nan", "optimizer.lr must be a number above 0, got nan"),
        ("parallel.bucket_cap_mb=1e999", "parallel.bucket_cap_mb must be finite, got inf"),
        ("training.grad_clip_norm=.inf", "training.grad_clip_norm must be finite, got inf"),
        ("model=3", "model is a section and must hold settings, got 3"),
        ("model", "--override 'model' must look like training.max_steps=50"),
        ("model.hidden=[1", "--override model.hidden, line 1: not valid YAML: "),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_way_out(file, override, message):
    with pytest.raises(ConfigError) as error:
        load_config(file(""), [override])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["../../x.json", "/tmp/x.json", "x/y.json", "x\\y.json", "x.txt", "x.json.txt", "x.gz", ".json", ""],
)
def test_a_trace_outside_the_rank_s_folder_or_that_readers_skip_is_refused(file, name):
    with pytest.raises(ConfigError) as error:
        load_config(file(""), [f"profiling.trace_filename='{name}'"])
    assert str(error.value) == (
        "profiling.trace_filename must be a file name without a folder that ends in .json or .json.gz, "
        f"got {name!r}"
    )


@pytest.mark.parametrize("name", ["x.json", "x.json.gz", "my run.v2.json", "..x.json"])
def test_a_trace_has_any_name_that_readers_find(file, name):
    config = load_config(file(""), [f"profiling.trace_filename='{name}'"])
    assert config.profiling.trace_filename == name


def test_a_name_that_is_no_configuration_is_told_those_that_come_with_aorta_and_those_beside_it(
    file, monkeypatch
):
    monkeypatch.chdir(file("").parent)
    with pytest.raises(ConfigError, match=r"; aorta comes with .*\bfsdp\b.*; [^;]* has run.yaml$"):
        load_config("nope")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: [", "not valid YAML"),
        ("- a\n- b", "must hold sections"),
        ("base: missing.yaml", "missing.yaml: no such config file; [^;]* has run.yaml$"),
        ("base: run.yaml", "is its own base"),
        ("base: 3", "base must be a file name"),
        ("1: 2", "1 is not a setting"),
    ],
)
def test_a_broken_file_is_one_line_with_its_name(file, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(file(text))
    assert "\n" not in str(error.value)
