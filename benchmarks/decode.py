"""Decoding speed: batched greedy generation, ours against transformers.generate, identical weights and tokens.

python benchmarks/decode.py [--batch 8] [--prompt 64] [--new 128] [--repeats 3]
"""

import argparse
import time

import torch
from peer import HYBRID, pair

from titan_nemotron.generation.decode import generate
from titan_nemotron.generation.sampling import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    ours, theirs = pair()
    shape = (arguments.batch, arguments.prompt)
    prompts = torch.randint(3, HYBRID.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=0, max_new_tokens=arguments.new)

    def run_ours() -> list[list[int]]:
        return [completion.tokens for completion in generate(ours, prompts.tolist(), sampling)]

    def run_theirs() -> list[list[int]]:
        out = theirs.generate(  # type: ignore[operator]
            prompts, max_new_tokens=arguments.new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return out[:, arguments.prompt :].tolist()

    times: dict[str, list[float]] = {"titan_nemotron": [], "transformers": []}
    for _ in range(arguments.repeats):  # interleaved, so that a busy machine slows both
        results = []
        for name, run in (("titan_nemotron", run_ours), ("transformers", run_theirs)):
            start = time.perf_counter()
            results.append(run())
            times[name].append(time.perf_counter() - start)
        assert results[0] == results[1], "the greedy tokens differ"
    print(f"batch {arguments.batch}, prompt {arguments.prompt}, {arguments.new} new tokens, fp32, CPU")
    for name, values in times.items():
        best = min(values)
        print(f"{name:15s} {best:7.2f} s   {arguments.batch * arguments.new / best:8.0f} tokens/s")
    print(f"ratio           {min(times['transformers']) / min(times['titan_nemotron']):7.2f} x, identical tokens")


if __name__ == "__main__":
    main()
