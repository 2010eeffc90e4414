"""What is checked of each kind of Nemotron 3 case.

Shapes: B rows, L positions, T = B * L tokens, E experts, K experts a token, V vocabulary.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.parity.case import Case
from titan_nemotron.generation.cache import Cache
from titan_nemotron.generation.decode import generate
from titan_nemotron.generation.sampling import Sampling
from titan_nemotron.layout import PADDING, Batch
from titan_nemotron.models.family import Losses
from titan_nemotron.models.nemotron3 import FAMILY
from titan_nemotron.ops.ssd import chunked
from titan_nemotron.optim.config import ScheduleConfig
from titan_nemotron.optim.router_bias import update_router_biases
from titan_nemotron.optim.schedule import learning_rate

WRONG_ANSWERS = ("logits_no_reset", "logits_hf_position_ids_only", "logits_hf519_clamped")
CHUNK_ATOL = 5e-6  # the answer may not depend on the chunk length; the reference itself moves by 1.1e-6


def documents(case: Case) -> Tensor:
    """Document ids [B, L] from whichever description of the documents the case has."""
    ids = case["input_ids"]
    if "seq_idx" in case:
        return case["seq_idx"].long()
    rows = case.meta.get("docs_rows") or [[ids.shape[1]]] * len(ids)
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])


def batch_of(model: nn.Module, tokens: Tensor, document_ids: Tensor) -> Batch:
    return Batch.from_rows(tokens, document_ids, length=tokens.shape[1], mtp_depths=model.config.mtp_depths)


def total_of(case: Case, batch: Batch, losses: Losses) -> Tensor:
    """The training loss: the main mean, and the mean over depths of each depth's mean."""
    total = losses.main / batch.num_targets
    for loss, count in zip(losses.mtp, batch.num_mtp_targets, strict=True):
        total = total + case.meta["mtp_loss_scaling_factor"] / len(losses.mtp) * loss / count
    return total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Hub name -> gradient."""
    by_name = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {}
    for hub_name, slot in FAMILY.hub.tensors(model.config).items():
        gradient = by_name.get(slot.parameter)
        if gradient is not None:
            found[hub_name] = gradient if slot.expert is None else gradient[slot.expert]
    return found


class Recorder:
    """Outputs of modules, call by call, by name; router.N keeps a router's inputs as well."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: dict[str, list[Any]] = {}
        self.inputs: dict[str, list[Tensor]] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self.outputs.setdefault(name, []).append(output)
            self.inputs.setdefault(name, []).append(inputs[0] if inputs else None)

        return keep

    def output(self, name: str, call: int = 0) -> Tensor:
        output = self.outputs[name][call]
        tensor: Tensor = output[0] if isinstance(output, tuple) else output
        return tensor


def check_hidden(case: Case, model: nn.Module, seen: Recorder, prefix: str = "") -> None:
    states = {"embed": "embeddings", "final_norm": "norm_f", "main": "norm_f"}
    states |= {f"layer.{i}": f"layers.{i}" for i in range(len(model.config.pattern))}
    for name, module in states.items():
        if f"{prefix}hidden.{name}" in case:
            case.near(seen.output(module), f"{prefix}hidden.{name}")


def check_routers(case: Case, model: nn.Module, seen: Recorder) -> None:
    for i, letter in enumerate(model.config.pattern):
        if letter != "E" or f"router.{i}.logits" not in case:
            continue
        name = f"layers.{i}.mixer.router"
        x, (indices, weights, _) = seen.inputs[name][0], seen.outputs[name][0]
        router = model.get_submodule(name)
        case.close((x @ router.weight.T).flatten(0, 1), f"router.{i}.logits")
        order = indices.flatten(0, 1).argsort(-1)
        expected_order = case[f"router.{i}.indices"].argsort(-1)
        expected = case[f"router.{i}.indices"].gather(-1, expected_order)
        assert torch.equal(indices.flatten(0, 1).gather(-1, order), expected), f"router.{i}.indices"
        weights = weights.flatten(0, 1).gather(-1, order)
        case.tensors[f"router.{i}.weights"] = case[f"router.{i}.weights"].gather(-1, expected_order)
        case.close(weights, f"router.{i}.weights")


def check_model(case: Case) -> None:
    model, tokens, document_ids = case.model(FAMILY), case["input_ids"], documents(case)
    seen = Recorder(model)
    logits = model(tokens, document_ids)
    case.close(logits, "logits")
    check_hidden(case, model, seen)
    check_routers(case, model, seen)
    for name in WRONG_ANSWERS:
        if name in case:
            case.far(logits, name)
    for name in case.tensors:
        if name.startswith("negative.") and case.tensors[name].shape == logits.shape:
            case.far(logits, name)
    batch = batch_of(model, tokens, document_ids)
    if "labels" in case:
        assert torch.equal(batch.labels, case["labels"])
    if "cu_seqlens" in case:
        assert torch.equal(batch.layout.cu_seqlens, case["cu_seqlens"])
        assert torch.equal(batch.layout.positions.long(), case["position_ids"])
    losses = model.loss(batch)
    total = total_of(case, batch, losses)
    case.equal_number(total.item(), case.meta["loss"])
    expected = torch.log_softmax(logits, -1).gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(losses.logprobs, torch.where(batch.labels < 0, 0, expected), atol=1e-5, rtol=0)
    total.backward()
    case.gradients_close(gradients(model))
    if "adamw" in case.meta:
        check_adamw(case)


def check_adamw(case: Case) -> None:
    """Loss and gradient norm before clipping, step by step; every parameter decays in this reference."""
    settings = case.meta["adamw"]
    model = case.model(FAMILY)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings["lr"],
        betas=tuple(settings["betas"]),
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
    )
    batch = batch_of(model, case["input_ids"], documents(case))
    for expected_loss, expected_norm in settings["loss_gradnorm_per_step"]:
        loss = total_of(case, batch, model.loss(batch))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        case.equal_number(loss.item(), expected_loss, 1e-4)
        case.equal_number(float(norm), expected_norm, 1e-3)
        optimizer.step()
        optimizer.zero_grad()


def check_mtp(case: Case) -> None:
    model, tokens, document_ids = case.model(FAMILY), case["input_ids"], documents(case)
    num_blocks = model.config.mtp_blocks
    assert num_blocks == (1 if case.meta["shared_weights"] else case.meta["depths"])
    case.close(model(tokens, document_ids), "logits")
    seen = Recorder(model)
    batch = batch_of(model, tokens, document_ids)
    assert torch.equal(batch.labels, case["labels"])
    losses = model.loss(batch)
    check_hidden(case, model, seen)
    case.equal_number(losses.main.item() / batch.num_targets, case.meta["loss_main"])
    for depth, expected in enumerate(case.meta["loss_mtp_per_depth"]):
        hidden = seen.output(f"mtp.blocks.{depth % num_blocks}", depth // num_blocks)
        case.near(hidden, f"mtp.{depth}.hidden")
        case.close(model.lm_head.logits(hidden), f"mtp.{depth}.logits")
        assert torch.equal(batch.mtp_labels[depth], case[f"mtp.{depth}.labels"])
        case.equal_number(losses.mtp[depth].item() / batch.num_mtp_targets[depth], expected)
    total = total_of(case, batch, losses)
    case.equal_number(total.item(), case.meta["loss"])
    total.backward()
    case.gradients_close(gradients(model))


def check_lengths(case: Case) -> None:
    """Every length with the scan's chunks of 8 and of 64, the longest with its gradients."""
    assert case.config["chunk_size"] == case.meta["chunk_size"]
    for chunk, length in itertools.product((8, 64), case.meta["lengths"]):
        model = case.model(FAMILY)
        with mock.patch.object(chunked, "CHUNK", chunk):
            seen = Recorder(model)
            tokens = case[f"s{length}.input_ids"]
            logits = model(tokens)
            case.close(logits, f"s{length}.logits")
            torch.testing.assert_close(logits, case[f"s{length}.logits"], atol=CHUNK_ATOL, rtol=0)
            check_hidden(case, model, seen, f"s{length}.")
            if str(length) in case.meta["losses"]:
                batch = batch_of(model, tokens, torch.zeros_like(tokens))
                loss = model.loss(batch).main / batch.num_targets
                case.equal_number(loss.item(), case.meta["losses"][str(length)])
                if length == max(case.meta["lengths"]):
                    loss.backward()
                    case.gradients_close(gradients(model))


@torch.no_grad()
def check_padding(case: Case) -> None:
    model = case.model(FAMILY)
    for side in ("left", "right"):
        mask = case[f"{side}.attention_mask"].bool()
        assert mask.sum(1).tolist() == case.meta["lengths"]
        logits = model(case[f"{side}.input_ids"], torch.where(mask, 0, PADDING))
        case.close(logits, f"{side}.logits", where=mask)


@torch.no_grad()
def check_decode(case: Case) -> None:
    model, prompt, greedy = case.model(FAMILY), case["prompt_ids"], case["greedy_tokens"]
    completions = generate(model, prompt.tolist(), Sampling(temperature=0, max_new_tokens=greedy.shape[1]))
    assert [completion.tokens for completion in completions] == greedy.tolist()
    case.close(torch.tensor([completion.logprobs for completion in completions]), "greedy_logprobs")
    case.close(model(torch.cat([prompt, greedy], dim=1)), "full_logits")

    cache = Cache(model, len(prompt), prompt.shape[1] + greedy.shape[1])
    steps = [model(tokens, cache=cache)[:, -1] for tokens in (prompt, *greedy.split(1, dim=1))]
    case.close(torch.stack(steps, dim=1), "step_logits")
    for i, letter in enumerate(model.config.pattern):
        if letter == "M":
            case.close(cache[f"layers.{i}"].conv_state, f"cache.{i}.conv_state")
            case.close(cache[f"layers.{i}"].ssm_state, f"cache.{i}.ssm_state")


def check_router(case: Case) -> None:
    """Selection with the bias, the sequence auxiliary loss and its gradient, and the update of the bias.

    The file's rows are tokens first: row t * B + b. The router gets the logits as its input, its weight is the identity.
    """
    meta = case.meta
    num_experts, shape = meta["E"], (meta["T"], meta["B"], meta["E"])
    model = FAMILY.model(FAMILY.hub.config_from_hub(case.config))
    moe, router = model.layers[0].mixer, model.routers()["layers.0"]
    settings = (router.topk, router.n_group, router.topk_group, router.scaling)
    assert settings == tuple(meta[key] for key in ("topk", "n_group", "topk_group", "scaling"))
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
        router.correction_bias.copy_(case["bias"])
    rows_TE = case["logits"].clone().requires_grad_()
    x_BLE = rows_TE.view(shape).transpose(0, 1)

    def as_rows(values_BLE: Tensor) -> Tensor:
        return values_BLE.transpose(0, 1).flatten(0, 1)

    indices, weights, sums = router(x_BLE, torch.ones(x_BLE.shape[:2], dtype=torch.bool))
    dense = torch.zeros(x_BLE.shape)
    assert torch.equal(as_rows(dense.scatter(-1, indices, 1.0)), case["routing_map"].float())
    case.close(as_rows(dense.scatter(-1, indices, weights.detach())), "routing_probs")

    auxiliary_B = moe.sequence_auxiliary_loss(sums)
    loss = meta["aux_coeff"] * auxiliary_B.mean()
    assert float(case["seq_aux_loss"]) == meta["seq_aux_loss"]
    case.equal_number(loss.item(), meta["seq_aux_loss"])
    loss.backward()
    error = (rows_TE.grad - case["seq_aux_loss_grad"]).norm() / case["seq_aux_loss_grad"].norm()
    assert error < meta["tolerance"]["grad_rel"]
    # Rows of one token each: the sums over a row are then the values of the token.
    _, _, single = router(case["logits"][:, None], torch.ones(meta["T"] * meta["B"], 1, dtype=torch.bool))
    assert torch.equal(single["auxiliary_counts_BE"], case["aux_routing_map"].float())
    case.close(single["score_sums_BE"], "aux_scores")

    counts_E = sums["counts_BE"].sum(0)
    assert torch.equal(counts_E, case["tokens_per_expert"])
    case.equal_number(float(counts_E.max() / counts_E.mean() - 1), meta["max_vio"])
    update_router_biases(model, {"layers.0": counts_E}, meta["bias_update_rate"])
    torch.testing.assert_close(router.correction_bias, case["updated_bias"], atol=1e-7, rtol=0)


def check_schedule(case: Case) -> None:
    for schedule in json.loads((case.folder / "schedule.json").read_text())["schedules"]:
        kind, shape = schedule["style"].lower().split("/")
        config = ScheduleConfig(
            kind=kind,
            decay_shape=shape,
            warmup_steps=schedule["warmup_steps"],
            decay_steps=schedule["wsd_decay_steps"],
            min_ratio=schedule["min_lr"] / schedule["max_lr"],
        )
        for step, expected in schedule["lr"]:
            found = learning_rate(config, schedule["max_lr"], step, schedule["decay_steps"])
            assert abs(found - expected) <= 1e-9 * schedule["max_lr"], f"step {step}: {found} for {expected}"


CHECKS: dict[str, Callable[[Case], None]] = {
    "model": check_model,
    "mtp": check_mtp,
    "lengths": check_lengths,
    "padding": check_padding,
    "decode": check_decode,
    "router": check_router,
    "schedule": check_schedule,
}
