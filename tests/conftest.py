"""Pico models, a few thousand parameters each, and a tokenizer for them: made here, downloaded never."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start; read when torch is imported
import torch

from tests.interpreting import report as report
from tests.remote_code import remote_code as remote_code

PICO = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.3,  # logits far enough apart that rounding never decides
}
MLA = {
    "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 6,
}  # fmt: skip
DEEPSEEK = {
    **MLA, "n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
"""What MLA and DeepSeek's experts need beside PICO."""
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
PRELOADED = [
    "retrofox.cli.app", "retrofox.conversion.verify", "retrofox.training.train", "transformers.models.llama", "peft",
]  # fmt: skip
"""Modules that a launched process finds imported."""

LONGEST = [
    "test_registration.py", "training/test_resume.py", "training/test_context.py", "model/test_model_fused.py",
    "kernels/test_compile.py", "reporting/test_report.py", "kernels/test_interpreter.py", "kernels/test_decode.py",
    "test_release.py", "serving/test_paged_kernels.py", "serving/test_steps.py", "evaluation/test_evaluate.py",
    "hub/test_hub.py", "training/test_interruptions.py", "training/test_train.py", "training/test_signals.py",
    "training/test_launches.py", "kernels/test_helpers_compile.py", "training/test_lora.py", "kernels/test_hopper.py",
    "planning/test_plan.py", "reporting/test_page.py", "evaluation/test_needle.py", "conversion/test_convert.py",
    "parallel/test_shared_rows.py",
]  # fmt: skip
"""Files that take longest, from 45 s to 20 s: they come first, so that none is left to one process at the end."""


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would start with the files of most tests, not of the longest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Pico models run fastest on one thread, and the machine may be shared."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """What is imported stays: to look through all of it took every gc.collect() half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def launch(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """launch(program, *arguments, processes=1, **environment) -> the finished process, or several seen as one.

    `program` is Python source. A process is the fork of one that has imported the package: a fork takes milliseconds,
    importing seconds. Several are ranks over gloo, with the variables that torchrun sets; they share one return code,
    the first that is not 0. None is stopped when another fails: they have to notice.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def run(program: str, *arguments: object, processes: int = 1, **environment: str):
        folder = tmp_path_factory.mktemp("launched")
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
        if processes > 1:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
            variables |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        started = []
        for rank in range(processes):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            streams = [str(folder / f"{kind}-{rank}") for kind in ("output", "error")]
            order = (*streams, {**os.environ, **variables, **ranks}, program, [str(each) for each in arguments])
            launched = str(Path(__file__).with_name("launched.py"))
            process = context.Process(target=runpy.run_path, args=(launched, {"ORDER": order}, "__main__"))
            with pytest.MonkeyPatch.context() as patch:  # what the first import of torch reads
                patch.setenv("OMP_NUM_THREADS", "1")
                patch.setenv("CUDA_VISIBLE_DEVICES", "")
                process.start()
            started.append(process)
        try:
            for process in started:
                wait([process.sentinel], timeout=250)
            codes = [process.exitcode for process in started]
        finally:
            for process in started:
                process.kill()
                process.join()
        assert None not in codes, f"processes hang: {codes}"
        output, error = (
            "".join(file.read_text() for file in sorted(folder.glob(f"{kind}-*"))) for kind in ("output", "error")
        )
        failed = next((code for code in codes if code), 0)
        return subprocess.CompletedProcess([*map(str, arguments)], failed, output, error)

    return run


@pytest.fixture(scope="session", autouse=True)
def forked_proofs(launch) -> Iterator[Callable[..., Any]]:
    """What the package runs in a fresh process, tests run in a fork; yields what starts a fresh one."""
    from retrofox.support import processes

    plain = processes.run_python
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "run_python", launch)
        yield plain


@pytest.fixture
def fresh_processes(forked_proofs, monkeypatch) -> None:
    """Parity proofs and merges run in fresh processes, as for users."""
    monkeypatch.setattr("retrofox.support.processes.run_python", forked_proofs)


@pytest.fixture(scope="session")
def pico_base() -> Callable[..., Any]:
    """pico_base(family, **config) -> a fresh causal LM in eval mode, the same weights every time."""

    def build(family: str, **config: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**PICO, **config})).eval()

    return build


@pytest.fixture(scope="session")
def pico_llama(pico_base) -> Callable[..., Any]:
    """pico_llama(**config) -> a fresh LlamaForCausalLM."""
    return functools.partial(pico_base, "llama")


@pytest.fixture(scope="session")
def stir() -> Callable[[Any], Any]:
    """stir(model) gives every added tensor random values, so that no identity hides a mistake; returns the model."""

    def stir(model: Any) -> Any:
        from retrofox.anatomy import is_new_tensor

        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_new_tensor(name):
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return model

    return stir


@pytest.fixture(scope="session")
def pico_fox(pico_base, stir) -> Callable[..., Any]:
    """pico_fox(stirred=True, family="llama", config={}, **spec) -> a converted pico model in eval mode.

    The default spec: short half-lives, a partial rotary dial, one sink token; stirred gates depend on the data.
    """

    def build(*, stirred: bool = True, family: str = "llama", config: Any = None, **spec: Any) -> Any:
        import retrofox
        from retrofox.fox_spec import FoxSpec, idle_fields

        values = {"half_life": (2.0, 200.0), "max_wavelength": 40.0}
        idle = idle_fields(*(spec.get(name, getattr(FoxSpec, name)) for name in ("rope", "gate", "init")))
        values = {name: value for name, value in values.items() if name not in idle} | spec
        model = retrofox.convert(pico_base(family, **(config or {})), fox=retrofox.FoxSpec(**values))
        return (stir(model) if stirred else model).eval()

    return build


@pytest.fixture(scope="session")
def pico_tokenizer() -> Any:
    """A byte-level tokenizer of 288 tokens with <s> (0) and </s> (1, also padding) and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PICO["vocab_size"],
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the fox forgets the gate, the gate forgets the fox, and so on and on"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def saved(pico_tokenizer) -> Callable[[Any, Path], Path]:
    """saved(model, directory) -> the directory, with the model and the pico tokenizer."""

    def save(model: Any, directory: Path) -> Path:
        model.save_pretrained(directory)
        pico_tokenizer.save_pretrained(directory)
        return directory

    return save


@pytest.fixture
def pico_checkpoint(pico_llama, saved, tmp_path) -> Path:
    """A directory with an unconverted pico Llama and its tokenizer."""
    return saved(pico_llama(), tmp_path / "pico-llama")


@pytest.fixture
def converted(pico_checkpoint, tmp_path) -> Path:
    """A directory as `retrofox convert` writes it of a pico Llama."""
    import retrofox

    retrofox.convert(pico_checkpoint, tmp_path / "fox", verify=False)
    return tmp_path / "fox"


@pytest.fixture
def saved_before(tmp_path) -> Callable[[str], Path]:
    """saved_before(name) -> a directory as commit d454864 saved it (loading/test_saved_before.py says how)."""

    def unpack(name: str) -> Path:
        directory = tmp_path / "before" / name
        directory.mkdir(parents=True)
        with zipfile.ZipFile(Path(__file__).parent / "loading" / "saved-at-d454864.zip") as archive:
            for member in archive.namelist():
                folder, file = member.split("/")
                if folder in (name, "code"):
                    (directory / file).write_bytes(archive.read(member))
        return directory

    return unpack


@pytest.fixture
def pico_fox_checkpoint(pico_fox, saved, tmp_path) -> Path:
    """A directory with a converted, stirred pico Llama and its tokenizer."""
    return saved(pico_fox(), tmp_path / "pico-fox")


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """run(*arguments) -> (exit code, stdout, stderr) of the command line, in this process."""

    def run_command(*arguments: object) -> tuple[int, str, str]:
        from retrofox.cli import app as cli

        monkeypatch.setattr(sys, "argv", ["retrofox", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command
