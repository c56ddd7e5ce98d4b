"""Scripts that the frameworks ship, with Offbeat in the place of DDP by one line.

Lightning's and Ray's are in test_lightning.py and test_ray.py. Transformers ships none in its package: TRL's
script runs its Trainer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integrations.scripts import installed, patch, torchrun

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

WORDS = ["<pad>", "<unk>", "<eos>", *(f"w{number}" for number in range(29))]


def test_accelerate_test_script_trains_what_one_process_trains(tmp_path: Path) -> None:
    """The script compares two ranks with one process itself, in single precision and in bfloat16."""
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    prepare = "train_dl, model, optimizer = accelerator.prepare(train_dl, model, optimizer)"
    ours = (
        "train_dl, model, optimizer, sync = offbeat.integrations.accelerate.prepare("
        "accelerator, train_dl, model, optimizer, strategy=offbeat.BSP())"
    )
    text = installed("accelerate", "test_utils/scripts/test_script.py")
    script.write_text(patch(text, "import offbeat, offbeat.integrations.accelerate", {prepare: ours}))
    said = torchrun(str(script), cwd=tmp_path, ACCELERATE_USE_CPU="true")
    assert "same results on one CPU or distributed setup with batch split" in said
    assert "BF16 training check" in said


@pytest.fixture
def tiny_llm(tmp_path: Path) -> list[str]:
    """The options of TRL's script for a small random model, its tokenizer and some sentences."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    config = transformers.LlamaConfig(**sizes, **tokens, num_key_value_heads=2, max_position_embeddings=32)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "train.jsonl").open("w") as file:
        for number in range(96):
            text = " ".join(WORDS[3 + (number * step) % 29] for step in range(1, 6 + number % 7))
            print(json.dumps({"text": text}), file=file)
    return ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]


def test_trl_sft_script_trains_what_it_trains_under_ddp(tiny_llm: list[str], tmp_path: Path) -> None:
    """Its defaults are bfloat16, gradient checkpointing and clipping; a checkpoint is written on the way.

    DDP's process ends without destroying DDP. Torch's destructor of it holds the GIL and waits for gloo's
    thread, which waits for the GIL to free what it gathered last: three of four such runs never ended.
    """
    pytest.importorskip("trl")
    from safetensors.torch import load_file

    text = installed("trl", "scripts/sft.py")
    begin = "    # Train the model\n"
    attach = "    offbeat.integrations.transformers.attach(trainer, offbeat.BSP())\n"
    ours = patch(text, "import offbeat, offbeat.integrations.transformers", {begin: attach})
    end = "        trainer.end()\n"
    theirs = patch(text, "import os", {end: f"{end}    os._exit(0)\n"})
    options = (
        "--max_steps 10 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 0.01 "
        "--save_steps 5 --report_to none --use_cpu True --disable_tqdm True"
    )
    for name, script in (("ddp", theirs), ("bsp", ours)):
        (tmp_path / f"{name}.py").write_text(script)
        out = ["--output_dir", str(tmp_path / name), *options.split()]
        caches = {
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        torchrun(str(tmp_path / f"{name}.py"), *tiny_llm, *out, cwd=tmp_path, **caches)
    begun, expected, found = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model", "ddp", "bsp")
    )
    assert all(value.equal(found[name]) for name, value in expected.items())
    assert not all(value.equal(found[name]) for name, value in begun.items())
    saved = tmp_path / "bsp" / "checkpoint-5"
    assert {path.name for path in saved.glob("offbeat-*")} == {"offbeat-0-of-2.pt", "offbeat-1-of-2.pt"}
