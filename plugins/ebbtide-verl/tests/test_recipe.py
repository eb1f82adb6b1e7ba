"""verl's trainer makes GRPO steps on a CPU, with this plugin, and with its SGLang rollout on compat/."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")
import pandas as pd

from ebbtide.srt.hf_folder import folder_of

NUM_STEPS = 3
COMPAT = Path(__file__).parents[3] / "compat"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(len(solution_str) % 7)
"""


def make_model(folder: Path) -> Path:
    """Copy the tiny model, with the end of a turn renamed to Qwen3's, by which verl knows it."""
    shutil.copytree(folder_of("tiny"), folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        file = folder / name
        file.write_text(file.read_text().replace("<|end|>", "<|im_end|>"))
    return folder


def make_prompts(file: Path) -> Path:
    rows = [
        {
            "data_source": "own",
            "prompt": [{"role": "user", "content": text}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight"))
    ]
    pd.DataFrame(rows).to_parquet(file)
    return file


def settings(folder: Path, rollout: str) -> list[str]:
    model, prompts = make_model(folder / "model"), make_prompts(folder / "prompts.parquet")
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        "++actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        f"actor_rollout_ref.rollout.name={rollout}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        f"+actor_rollout_ref.rollout.engine_kwargs.{rollout}.device=cpu",
        f"+actor_rollout_ref.rollout.engine_kwargs.{rollout}.max_total_tokens=4096",
        f"reward.custom_reward_function.path={reward}",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.logger=[console]",
        # A logical GPU, which Ray accepts without a real one.
        "+ray_kwargs.ray_init.num_gpus=1",
        "ray_kwargs.ray_init.num_cpus=32",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


@pytest.mark.parametrize("rollout", ["ebbtide", "sglang"])
def test_grpo_trains_and_the_engine_samples_from_its_weights(tmp_path: Path, rollout: str) -> None:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "VERL_PLATFORM": "cpu",
        # verl lists training engines by device, and none for "cpu". That of FSDP2 for "cuda" needs no GPU.
        "VERL_ENGINE_DEVICE": "cuda",
        "PYTHONPATH": os.pathsep.join([*paths, str(COMPAT)] if rollout == "sglang" else paths),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings(tmp_path, rollout)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    differences = re.findall(r"training/rollout_probs_diff_max:([\d.e-]+)", output)
    assert len(differences) == NUM_STEPS
    # At each step the engine sampled with the trainer's weights, except that verl sends them in bfloat16. The
    # learning rate is so high that weights of the step before would differ much more.
    assert max(map(float, differences)) < 0.1
