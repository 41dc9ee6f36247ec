"""The command line: fast to start, clear when wrong, exit code 2 and nothing left behind."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import typer

from retrofox import FoxSpec
from retrofox.cli import app as cli
from retrofox.cli.spec_options import spec_fields
from retrofox.fox_spec import STATE
from retrofox.support.files import write_whole


def test_help_imports_nothing_heavy():
    code = "import sys; sys.argv = ['retrofox', '--help']\nimport retrofox.cli.app\n"
    code += "try: retrofox.cli.app.main()\nexcept SystemExit: pass\n"
    code += "heavy = {'torch', 'transformers', 'numpy', 'triton', 'fox_kernels', 'pydantic'} & set(sys.modules)\n"
    code += "sys.exit(f'imported {heavy}' if heavy else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "convert" in done.stdout


def test_help_is_not_cut_off_on_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands = [command.name or command.callback.__name__ for command in cli.app.registered_commands]  # type: ignore
    assert {"convert", "train", "eval", "generate"} <= set(commands)
    for command in commands:
        code, out, _ = run(command, "--help")
        assert code == 0
        assert "…" not in out, command


def test_every_part_of_the_spec_can_be_given(run, source, tmp_path):
    options = "--rope partial --max-wavelength 256Mi --horizon 9 --sink-tokens 2 --log-n 128 --pro k-shift"
    options += ' --layer-max-wavelength {"0":.inf} --gate bias --init slopes --half-life 4 1Ki --dry-run --json'
    code, out, _ = run("convert", source, tmp_path / "out", *options.split())
    assert code == 0
    plan = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert plan["half_lives_tokens"] == pytest.approx([4, 1024], rel=1e-5)
    spec = plan["spec"]
    given = {
        "rope": "partial",
        "max_wavelength": 2**28,
        "horizon": 9.0,
        "sink_tokens": 2,
        "log_n": 128,
    }
    assert given.items() <= spec.items()
    assert spec["pro"] == ["k-shift"]
    assert spec["layer_max_wavelength"] == {"0": 1e12}
    assert spec["half_life"] == [4.0, 1024.0]


def test_changes_as_recipes_have_them_and_options_mean_the_same(run, source, tmp_path):
    changes = ["fox.half_life=[512,64Ki]", "fox.horizon=16", "fox.layer_max_wavelength={0: .inf}", "fox.rope=partial"]
    options = '--half-life 512 64Ki --horizon 16 --layer-max-wavelength {"0":.inf} --rope partial'
    specs = []
    for given in (changes, options.split(), [*options.split()[:3], *changes[1:]]):
        code, out, err = run("convert", source, tmp_path / "out", "--dry-run", "--json", *given)
        assert code == 0, err
        specs.append(json.loads(out)["spec"])
    assert specs[0] == specs[1] == specs[2]
    assert (specs[0]["half_life"], specs[0]["horizon"]) == ([512.0, 65536.0], 16.0)


def test_every_field_of_a_spec_that_a_user_may_set_has_an_option():
    fields = {*FoxSpec.__dataclass_fields__} - set(STATE)
    assert spec_fields().keys() == fields
    assert all(spec_fields().values())


def test_a_dry_run_says_what_would_be_refused(run, source, tmp_path):
    code, out, _ = run("convert", source, tmp_path / "out", "--dry-run", "--horizon", 16)
    assert code == 0
    for text in ("1 x 2", "2 tensors, 34 parameters, 136 bytes", "1 files", "copied, never loaded", "16 nats"):
        assert text in out
    cut = tmp_path / "cut"
    shutil.copytree(source, cut)
    (cut / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-8])
    code, _, err = run("convert", cut, tmp_path / "out", "--dry-run")
    assert code == 2
    assert "download it again" in err
    code, _, err = run("convert", source, cut, "--dry-run")
    assert code == 2
    assert "exists: remove it" in err
    assert [file.name for file in tmp_path.iterdir()] == ["cut"]
    code, _, err = run("convert", source, "/proc/new", "--no-verify")
    assert (code, "error: /proc/new can't be made: No such file or directory" in err) == (2, True)


@pytest.mark.parametrize("options", ["--max-wavelength inf", "--half-life 0.01 1e12", "--pro qk-norm,qk-norm"])
def test_extreme_numbers_stay_numbers(run, source, tmp_path, options):
    arguments = ["convert", source, tmp_path / "out", "--no-verify", "--json", *options.split()]
    code, out, _ = run(*arguments)
    assert code == 0
    for text in (out, (tmp_path / "out" / "config.json").read_text()):
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert json.loads(out)["plan"]["spec"]["pro"] in ([], ["qk-norm"])


BAD = {
    "--preset fox-por": "preset must be one of fox-stretch, fox-llama, fox-pro, transformer-llama",
    "--sink-tokens 99999999999": "sink_tokens must be an integer >= 0 and below 2^31",
    "--half-life 1e-9 1e300": "0.01 <= shortest <= longest <= 1e12",
    "--half-life a 4KB": "half_life takes two numbers of tokens",
    "--rope drop --max-wavelength 100": "max_wavelength: rope drop leaves it without effect",
    "--init open --half-life 8 64": "half_life: init open leaves it without effect",
    "--pro official": "official changes qk-norm, k-shift and v-shift: add one of them",
    "--horizon 1e300": "horizon must be the nats",
    "--layer-max-wavelength 0:5": "layer_max_wavelength takes tokens per layer",
    '--layer-max-wavelength {"7":5}': "layer_max_wavelength names layers [7]; the model has 0..0",
    "--init measured --texts missing.txt": "no data at missing.txt",
    "--init measured": "--texts FILES",
    "--open-heads 3": "open_heads takes [[layer, kv head], ...], or with init measured a number",
    "--revision main": "belongs to a Hub id",
    "stages.0.tokens=5": "convert takes changes of fox, such as fox.horizon=16",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_options_exit_2_with_a_clear_text(run, source, tmp_path, arguments):
    code, _, err = run("convert", source, tmp_path / "out", *arguments.split())
    assert code == 2
    assert BAD[arguments] in " ".join(err.split())
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_arguments_are_refused_before_torch_is_imported(source, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: m\n")
    refused = {
        "plan no-such-recipe": "none of this name ships",
        "plan {r} model=3": "r.yaml: model: input should be a valid string",
        "needle {base} --data x.txt --lengths abc": "lengths must be whole numbers",
        "needle {base} --data x.txt --lengths 1Ki,4KB": "Ki, Mi, Gi: of 1024",
        "eval {base} --data x.txt --length 4KB": "Ki, Mi, Gi: of 1024",
        "inspect {base} --length 4KB": "Ki, Mi, Gi: of 1024",
        "needle {base} --data x.txt --mode hard": "mode must be one of easy, standard",
        "generate {base}": "no prompt given",
        "generate {base} hi --top-p .5": "no effect on greedy decoding",
        "generate {base} hi --max-new-tokens -3": "1 or more",
        "eval {base}": "nothing to evaluate on",
        "plan smollm2-lora --sharding fsdp1": "--sharding",
        "push ./absent me/fox": "does not exist",
        "merge ./absent out": "does not exist",
        "convert {base} {base}": "exists: remove it",
        "convert {base} {base}/new/sub": "choose another OUT, outside of it",
        "recipes new --model {base} --gpu 4090 --out /proc/new.yaml": "/proc/new.yaml: No such file or directory",
        "convert {base} out fox.rope=keeep": "(did you mean 'keep'?)",
        "recipes cp smollm2-lora absent/x/y.yaml": "error: absent/x/y.yaml: No such file or directory",
        "train absent.yaml": "absent.yaml",
        "convert ./absent out": "./absent: no such directory",
        "eval {base} --against ./absent --data {r}": "./absent: no such directory",
        "inspect {base} --data absent.txt": "no data at absent.txt",
        "panel {base} --against {base} --data verse=absent": "no data at absent",
        "generate ./absent hi": "./absent: no such directory",
        "train smollm2-control model=./absent": "./absent: no such directory",
        "train smollm2-control model={base} data.train=[absent.txt]": "no data at absent.txt",
    }
    code = """
import shlex, sys, retrofox.cli.app as app
for arguments in sys.stdin.read().splitlines():
    sys.argv = ["retrofox", *shlex.split(arguments)]
    try:
        app.main()
    except SystemExit as end:
        print("#", end.code, "torch" in sys.modules, file=sys.stderr)
"""
    given = "\n".join(refused).format(base=source, r=recipe)
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    *texts, rest = " ".join(done.stderr.replace("│", " ").split()).split("# 2 False")
    assert (len(texts), rest) == (len(refused), ""), done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [recipe]
    for text, wanted in zip(texts, refused.values(), strict=True):
        assert wanted in text


@pytest.mark.parametrize(
    "values",
    [
        {"num_attention_heads": 3},
        {"hidden_size": "16"},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        {"is_causal": False},
        {"pad_token_id": 100_000},
    ],
    ids=str,
)
def test_configs_that_make_no_model_exit_2(run, source, tmp_path, values):
    shutil.copytree(source, tmp_path / "odd")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**config, **values}))
    code, _, err = run("convert", tmp_path / "odd", tmp_path / "out")
    assert code == 2
    assert any(t in err for t in ("can't be opened in transformers", "is '16'", "gates need a causal", "belongs"))
    assert [file.name for file in tmp_path.iterdir()] == ["odd"]


def test_options_that_take_files_take_several():
    spread = cli.spread(["eval", "M", "--data", "a", "b", "c", "--length", "7"])
    assert spread == ["eval", "M", "--data", "a", "--data", "b", "--data", "c", "--length", "7"]
    for untouched in ("eval --data a --length 7 MODEL", "generate MODEL a b", "convert S O --half-life 1 2", "--data"):
        assert cli.spread([*untouched.split()]) == untouched.split()
    home, name = os.path.expanduser("~"), os.path.relpath(__file__, os.path.expanduser("~"))
    assert cli.at_home(["eval", "~/a b", "--out=~/c"]) == ["eval", f"{home}/a b", f"--out={home}/c"]
    assert cli.at_home(["inspect", "~a", "--out=~"]) == ["inspect", "~a", f"--out={home}"]
    told = ["~/ is home", "--system=~/absent", "~", "--help"]
    assert cli.at_home(["chat", f"~/{name}", *told]) == ["chat", f"{home}/{name}", *told]
    commands = typer.main.get_command(cli.app).commands.values()  # type: ignore[attr-defined]
    options = [option for command in commands for option in command.params if getattr(option, "multiple", False)]
    assert {name for option in options for name in option.opts} == set(cli.SEVERAL)


def test_terminals_of_another_encoding_get_a_question_mark_instead_of_an_error():
    code = (
        "from retrofox.cli import app as cli\n@cli.app.command('say')\ndef say(): print(input(), '\\xb1')\ncli.main()"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([sys.executable, "-c", code, "say"], input=b"h\xff\n", capture_output=True, env=environment)
    assert (done.returncode, done.stdout) == (0, b"h? ?\n"), done.stderr


def test_a_file_that_can_not_be_replaced_is_named_itself(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "app", lambda: write_whole(tmp_path, b"a file in a folder's place"))
    monkeypatch.setattr(sys, "argv", ["retrofox"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: Is a directory\n"
