"""Hugging Face's Trainer on a store. Kill it at any moment and start it again: it continues.

python examples/hf_trainer.py [STEPS]    # trains 12 steps more; the second run resumes
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from pccheck_async import list_checkpoints
from pccheck_async.integrations.transformers import PCcheckCallback

STORE = "checkpoints/hf_trainer"
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 12

torch.manual_seed(0)
text = torch.randint(0, 64, (40, 16))  # in place of a tokenizer's output
samples = [{"input_ids": line, "labels": line} for line in text]
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
done = max((info.step for info in list_checkpoints(STORE)), default=0)
arguments = TrainingArguments(
    "checkpoints/hf_trainer_output",
    max_steps=done + STEPS,
    lr_scheduler_type="constant",  # others depend on the number of steps, and that grows here
    gradient_accumulation_steps=2,
    per_device_train_batch_size=4,
    logging_steps=4,
    save_strategy="no",  # the Trainer's own checkpoints may go on beside the store's
    report_to=[],
    use_cpu=True,
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=samples)
callback = PCcheckCallback(STORE, interval=5).attach(trainer)
result = trainer.train()
print(f"resumed after step {callback.restored.step}" if callback.restored else "starting from scratch")
print(f"step {result.global_step}: loss {result.training_loss:.4f}; saved: {callback.engine.latest}")
