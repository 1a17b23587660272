"""Fine-tune a model of transformers with its Trainer, each sequence split over all ranks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import sp_core as sp
from sp_core.integrations.transformers import one_process, parallelize


def main(comm: Any, folder: str) -> list[float]:
    """Return the losses of 20 steps."""
    torch.manual_seed(0)  # the same weights on every rank
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)  # or from_pretrained("Qwen/Qwen3-0.6B")
    sequences = (torch.arange(256) * torch.arange(1, 9)[:, None]) % 64  # the same on every rank
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in sequences]
    with one_process():
        arguments = TrainingArguments(
            folder,
            max_steps=20,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=comm.rank > 0,
            save_strategy="steps" if comm.rank == 0 else "no",
            save_steps=20,
        )
    with sp.Mesh(comm, ring=comm.size) as mesh:
        trainer = Trainer(parallelize(model, mesh), arguments, train_dataset=rows)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    from mpi4py import MPI

    losses = main(MPI.COMM_WORLD, sys.argv[1])
    if MPI.COMM_WORLD.rank == 0:
        print("losses:", *losses)
