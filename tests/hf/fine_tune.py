"""Fine-tune a model of transformers with its Trainer, each sequence split over all ranks."""

import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import sp_core as sp
from sp_core.integrations.transformers import one_process, parallelize


def main(mesh: sp.Mesh, folder: str) -> list[float]:
    """Return the losses of 20 steps."""
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model("qwen3", **sizes, **heads, **ends)
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
            disable_tqdm=mesh.rank > 0,
            save_strategy="steps" if mesh.rank == 0 else "no",
            save_steps=20,
        )
    trainer = Trainer(parallelize(model, mesh), arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this
        torch.distributed.init_process_group("gloo")
        comm, size = None, torch.distributed.get_world_size()
    else:
        from mpi4py import MPI

        comm, size = MPI.COMM_WORLD, MPI.COMM_WORLD.size
    with sp.Mesh(comm, ring=size) as mesh:
        losses = main(mesh, sys.argv[1])
    if mesh.rank == 0:
        print("losses:", *losses)
    if comm is None:
        torch.distributed.destroy_process_group()
