"""[parallel.fsdp]: no key changes a gradient, and each moves what it says, counted in operations and bytes."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.cases_mesh import EIGHT, own_batches
from tests.distributed.harness import Context, case
from tests.distributed.reference import ROWS, SETTINGS, relative, sharded, unsharded, whole_gradients
from titan_nemotron.errors import UserError
from titan_nemotron.models.nemotron3.model import Nemotron3
from titan_nemotron.parallel.config import FSDPConfig, ParallelConfig
from titan_nemotron.parallel.fsdp import BFloat16Wire, moe_blocks, set_reduce_scatter
from titan_nemotron.parallel.mesh import SHARD, Mesh, build_mesh
from titan_nemotron.parallel.sharded import local_part
from titan_nemotron.train.step import forward_backward, global_totals, total_loss

DEGREES: dict[int, list[dict[str, int]]] = {  # of one copy, of copies, of experts spread over ranks
    2: [{}, {"expert": 2}],
    4: [{}, {"replicate": 2}, {"expert": 2}],
}


class Transfer(NamedTuple):
    """A collective operation as the process group got it: gather, reduce (a reduce-scatter), exchange (an all-to-all) or sum
    (an all-reduce); the dtype and the number of elements that this rank gave; the number of ranks."""

    kind: str
    dtype: torch.dtype
    numel: int
    ranks: int


class Traffic(TorchDispatchMode):
    """Notes collective operations in their order."""

    KINDS: ClassVar = {  # operation -> kind, and where among its arguments the tensor is that this rank gives
        "_allgather_base_": ("gather", 1),
        "_reduce_scatter_base_": ("reduce", 1),
        "alltoall_base_": ("exchange", 1),
        "allreduce_": ("sum", 0),
    }

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[Transfer] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        name = function.overloadpacket.__name__
        if name in self.KINDS and function.namespace == "c10d":
            kind, place = self.KINDS[name]
            given = arguments[place][0] if kind == "sum" else arguments[place]
            group = next(a for a in arguments if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            ranks = dist.ProcessGroup.unbox(group).size()
            self.transfers.append(Transfer(kind, given.dtype, given.numel(), ranks))
        return function(*arguments, **(keywords or {}))

    def of(self, kind: str) -> list[Transfer]:
        return [transfer for transfer in self.transfers if transfer.kind == kind]


def meshes(context: Context) -> Iterator[tuple[dict[str, int], Mesh]]:
    for degrees in DEGREES[context.world_size]:
        yield degrees, build_mesh(ParallelConfig(**degrees), torch.device("cpu"))


def built(mesh: Mesh, degrees: dict[str, int] | None = None, **keys: Any) -> Nemotron3:
    return sharded(mesh, config=EIGHT, parallel=ParallelConfig(**(degrees or {}), fsdp=FSDPConfig(**keys)))


def run(model: Nemotron3, mesh: Mesh, size: int = 1, **settings: Any) -> tuple[dict[str, Tensor], Traffic]:
    """The gradient of global batch 0 in microbatches of `size` rows, and what its forwards and backwards moved."""
    batches = own_batches(0, mesh, size)
    totals = global_totals(batches)
    with Traffic() as traffic:
        forward_backward(model, batches, totals, dataclasses.replace(SETTINGS, **settings))
    found = whole_gradients(model)
    model.zero_grad()
    return found, traffic


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, gradient in expected.items() if not torch.equal(actual[name], gradient)] == []


def gathered_by(block: nn.Module) -> list[int]:
    """Elements that this rank gives to each gather of a block; none where one rank holds a group."""
    groups = block._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator, union-attr]
    sizes = [sum(part.padded_sharded_param_size.numel() for part in group.fsdp_params) for group in groups]
    return [size for size, group in zip(sizes, groups, strict=True) if group.mesh_info.shard_mesh_size > 1]


def uses(model: Nemotron3, block: nn.Module) -> int:
    """Forwards of a block in a microbatch."""
    return model.mtp.depths if model.mtp is not None and block in set(model.mtp.modules()) else 1


def experts(model: Nemotron3) -> list[nn.Module]:
    return moe_blocks([block for _, block in model.blocks()])


@case(2, 4)
def copies_meet_once_a_step(context: Context) -> None:
    """All-reduces between copies run in the last microbatch alone, over the shard of every gradient once; none with one."""
    several = {2: [{"replicate": 2}], 4: [{"replicate": 2}, {"replicate": 2, "expert": 2}]}[context.world_size]
    for degrees in several:
        mesh = build_mesh(ParallelConfig(**degrees), torch.device("cpu"))
        model = built(mesh)
        number = ROWS // mesh.dense.size()
        _, once = run(model, mesh, number)
        for every in (False, True):
            _, traffic = run(model, mesh, 1, sync_every_microbatch=every)
            sums, alone = traffic.of("sum"), once.of("sum")
            if every:
                assert sums == alone
            else:  # a module that is used several times reduces what it had from earlier microbatches apart
                assert not Counter(alone) - Counter(sums) and len(sums) < 2 * len(alone)
            first_sum = next(index for index, transfer in enumerate(traffic.transfers) if transfer.kind == "sum")
            before = [transfer for transfer in traffic.transfers[:first_sum] if transfer.kind == "reduce"]
            assert len(before) >= len(once.of("reduce")) * (every and number - 1)
            assert {(transfer.dtype, transfer.ranks) for transfer in sums} == {(torch.float32, 2)}
        assert sum(t.numel for t in once.of("sum")) >= sum(local_part(p)[0].numel() for p in model.parameters())
    model = built(context.mesh)
    assert run(model, context.mesh)[1].of("sum") == []


@case(2, 4)
def experts_kept_gathered(context: Context) -> None:
    """Kept after the forward: bitwise the same, and each kept block is gathered half as often; the others as before."""
    for degrees, mesh in meshes(context):
        expected, default = run(built(mesh), mesh)
        number = len(own_batches(0, mesh, 1))
        for kept in (1, 2):
            model = built(mesh, moe_layers_kept_gathered=kept)
            actual, traffic = run(model, mesh)
            assert_equal(actual, expected)
            saved: Counter[int] = Counter()
            for block in experts(model)[-kept:]:
                for size in gathered_by(block):
                    saved[size] += number * uses(model, block)
            fewer = Counter(t.numel for t in default.of("gather"))
            fewer.subtract(t.numel for t in traffic.of("gather"))
            assert +fewer == saved and not -fewer, (degrees, kept, fewer, saved)
            assert traffic.of("reduce") == default.of("reduce")


@case(2, 4)
def experts_kept_between_microbatches(context: Context) -> None:
    """Kept until the next forward: bitwise the same, (M + 1) u gathers of a block instead of 2 M u for M microbatches that
    use it u times, and everything is a shard again after the last."""
    for degrees, mesh in meshes(context):
        number = len(own_batches(0, mesh, 1))
        model = built(mesh)
        for every in (False, True):
            expected, default = run(model, mesh, sync_every_microbatch=every)
            actual, traffic = run(model, mesh, sync_every_microbatch=every, keep_experts_between_microbatches=True)
            assert_equal(actual, expected)
            saved: Counter[int] = Counter()
            for block in experts(model):
                for size in gathered_by(block):
                    saved[size] += (number - 1) * uses(model, block)
            fewer = Counter(t.numel for t in default.of("gather"))
            fewer.subtract(t.numel for t in traffic.of("gather"))
            assert +fewer == saved and not -fewer, (degrees, fewer, saved)
            assert traffic.of("reduce") == default.of("reduce")
            assert all(hasattr(parameter, "to_local") for parameter in model.parameters())


@case(2, 4)
def gathers_ahead(context: Context) -> None:
    """prefetch = 2: bitwise the same and as many gathers, each block's one block earlier, forward and backward."""
    for degrees, mesh in meshes(context):
        found = {}
        for number in (1, 2):
            model = built(mesh, prefetch=number)
            begun: list[int] = []
            with Traffic() as traffic:
                for layer in model.layers:
                    layer.mixer.register_forward_pre_hook(  # type: ignore[union-attr]
                        lambda *_, seen=traffic, to=begun: to.append(len(seen.of("gather")))
                    )
                batch = own_batches(0, mesh, 1)[:1]
                forward_backward(model, batch, global_totals(batch), SETTINGS)
            before_reduces = [
                sum(t.kind == "gather" for t in traffic.transfers[:index])
                for index, transfer in enumerate(traffic.transfers)
                if transfer.kind == "reduce"
            ]
            found[number] = (whole_gradients(model), traffic, begun, before_reduces)
        (expected, one, begun_1, reduces_1), (actual, two, begun_2, reduces_2) = found[1], found[2]
        assert_equal(actual, expected)
        assert Counter(one.transfers) == Counter(two.transfers)
        if "expert" not in degrees:  # where experts have gathers of their own, a block can have two
            assert [second - first for first, second in zip(begun_1, begun_2, strict=True)] == [1, 1, 0, 0]
        leads = [second - first for first, second in zip(reduces_1, reduces_2, strict=True)]
        assert min(leads) >= 0 and max(leads) >= 1, (degrees, leads)


@case(2, 4)
def forwards_alone_leave_nothing_gathered(context: Context) -> None:
    """After a forward without gradient, of the logits or of the loss, every weight is a shard, and no gather is under way
    that a later forward would take for the weights of then: with any key, the next gradient is that of the new weights."""
    keys: list[dict[str, Any]] = [
        {},
        {"prefetch": 3},
        {"moe_layers_kept_gathered": 2},
        {"reshard_after_forward": False},
        {"keep_experts_between_microbatches": True, "reduce_scatters_in_flight": 2},
    ]
    for _, mesh in meshes(context):
        batch = own_batches(0, mesh, 1)[0]
        for chosen in keys:
            found = []
            for forwards in (False, True):
                model = built(mesh, **chosen)
                if forwards:
                    with torch.no_grad():
                        model(batch.tokens)
                        model.loss(batch)
                        model(batch.tokens)
                    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), chosen
                    for module in model.modules():
                        groups = module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []
                        assert all(group._all_gather_result is None for group in groups), chosen
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.5)
                found.append(run(model, mesh)[0])
            assert_equal(found[1], found[0])


@case(2, 4)
def reductions_in_flight(context: Context) -> None:
    """A window of three buffers: bitwise the same, as many reductions; they are on a group of their own."""

    class Window(Traffic):
        """Notes besides how many buffers of earlier reductions are held when one starts, and the groups."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.held, self.groups = model, list[int](), Counter[tuple[str, str]]()

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            before = len(self.transfers)
            out = super().__torch_dispatch__(function, types, arguments, keywords)
            for transfer in self.transfers[before:]:
                if transfer.kind == "reduce":
                    self.held.append(len(self.model._get_fsdp_state()._comm_ctx.reduce_scatter_states))
                boxed = next(
                    a for a in arguments if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
                )
                self.groups[transfer.kind, dist.ProcessGroup.unbox(boxed).group_name] += 1
            return out

    for degrees, mesh in meshes(context):
        found = {}
        for number in (1, 3):
            model = built(mesh, reduce_scatters_in_flight=number)
            batches = own_batches(0, mesh, 1)
            totals = global_totals(batches)
            with Window(model) as window:
                forward_backward(model, batches, totals, SETTINGS)
            found[number] = (whole_gradients(model), window)
        assert_equal(found[3][0], found[1][0])
        assert found[3][1].transfers == found[1][1].transfers
        extra = 1 if "expert" in degrees else 0  # a block with experts on a mesh of their own has two buffers
        assert max(found[1][1].held) <= extra and 2 <= max(found[3][1].held) <= 2 + extra
        for number in (1, 3):
            groups = {kind: {g for k, g in found[number][1].groups if k == kind} for kind in ("gather", "reduce")}
            assert bool(groups["gather"] & groups["reduce"]) == (number == 1), groups


def contributions(batches: list[Any], mesh: Mesh) -> dict[str, Tensor]:
    """sum over ranks and microbatches of |the gradient of its rows|, from an unsharded model in fp32."""
    model = unsharded(EIGHT)
    totals = global_totals(batches)
    found: dict[str, Tensor] = {}
    for batch in batches:
        total_loss(model.loss(batch), totals, SETTINGS).backward()
        for name, gradient in whole_gradients(model).items():
            found[name] = found.get(name, 0) + gradient.abs()
        model.zero_grad()
    for size in found.values():
        dist.all_reduce(size)
    return found


@case(2, 4)
def gradients_travel_in_bf16(context: Context) -> None:
    """Half the bytes, sums in fp32: each element is off by at most 2^-8 of the sum of the absolute contributions.

    bf16 has 8 significant bits, so rounding a contribution g errs by at most 2^-8 |g|, and fp32 sums add nothing to speak of.
    A rank contributes once a step, or, where a module is used several times, with parts of its microbatches. The output
    layer and the small fp32 layers are bitwise as without.
    """
    for degrees, mesh in meshes(context):
        bounds = contributions(own_batches(0, mesh, 1), mesh)
        expected, default = run(built(mesh), mesh)
        model = built(mesh, reduce_dtype="bfloat16")
        actual, traffic = run(model, mesh)
        small = {
            f"{name}.{part}"
            for name, module in model.named_modules()
            if getattr(module, "stays_fp32", False)
            for part, _ in module.named_parameters(recurse=False)
        }
        rounded = 0
        for name, gradient in expected.items():
            if name in small:
                assert torch.equal(actual[name], gradient), name
                continue
            error, bound = (actual[name] - gradient).abs(), bounds[name]
            assert (error <= 2**-8 * bound + 1e-6 * bound.max()).all(), (degrees, name, (error / bound).max())
            rounded += not torch.equal(actual[name], gradient)
            if mesh.dense[SHARD].size() > 1 and "experts" not in name:  # a bf16 sum would be a bf16 number
                assert not torch.equal(actual[name].bfloat16().float(), actual[name]), name
        assert rounded > 10
        plain, wire, whole = (Counter((t.numel, t.ranks) for t in transfers) for transfers in (
            default.of("reduce"), traffic.of("exchange"), traffic.of("reduce")
        ))  # fmt: skip
        assert plain == wire + whole and {t.dtype for t in traffic.of("exchange")} == {torch.bfloat16}
        shard = mesh.dense[SHARD].size()
        assert {numel for numel, _ in whole} == {
            shard * size for part in (model, model.lm_head) for size in gathered_by(part)
        }
        assert {t.dtype for t in traffic.of("reduce")} == {torch.float32}
        assert traffic.of("gather") == default.of("gather") and traffic.of("sum") == default.of("sum")


@case(2, 4)
def parts_of_rows_travel_in_bf16(context: Context) -> None:
    """Ranks that share rows reduce on the same wire: each tensor within the rounding of contributions, which may cancel."""
    for expert in (1, 2):
        degrees = {"context": context.world_size, "expert": expert}
        mesh = build_mesh(ParallelConfig(**degrees), torch.device("cpu"))
        expected, _ = run(built(mesh, degrees), mesh)
        actual, traffic = run(built(mesh, degrees, reduce_dtype="bfloat16"), mesh)
        assert torch.equal(actual["lm_head.weight"], expected["lm_head.weight"])
        errors = {name: relative(actual[name], gradient) for name, gradient in expected.items()}
        assert max(errors.values()) <= 2**-7 and sum(error > 0 for error in errors.values()) > 10, errors
        assert torch.bfloat16 in {t.dtype for t in traffic.of("exchange")}


@case(2, 4)
def bf16_wire_sums_in_fp32(context: Context) -> None:
    """Numbers that bf16 holds and whose sum it does not: exact."""
    ranks, comm = context.world_size, BFloat16Wire()
    given = torch.arange(3.0 * ranks) + 1 if context.rank == 0 else torch.full((3 * ranks,), 2.0**-10)
    out = comm.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
    comm(out, given, dist.group.WORLD, dist.ReduceOp.SUM)
    expected = torch.arange(3.0) + 3 * context.rank + 1 + (ranks - 1) * 2.0**-10
    assert torch.equal(out, expected) and not torch.equal(expected.bfloat16().float(), expected)


@contextmanager
def older(*missing: str) -> Iterator[None]:
    """FSDPModule without these methods, as in PyTorch before them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in missing:
            patch.delattr(FSDPModule, name)
        yield


@case(2)
def keys_that_do_not_fit(context: Context) -> None:
    """One line that names the key."""
    dense = EIGHT.model_copy(update={"pattern": "M*-", "mtp_blocks": 0, "mtp_depths": 0})
    wrong = [
        (EIGHT, {"moe_layers_kept_gathered": 3}, r"kept_gathered = 3: the model has 2 .* use at most 2"),
        (
            dense,
            {"keep_experts_between_microbatches": True},
            r"microbatches = true: the model has no .* set it to false",
        ),
    ]
    for config, keys, line in wrong:
        with pytest.raises(UserError, match=rf"^parallel\.fsdp\..*{line}$"):
            sharded(context.mesh, config=config, parallel=ParallelConfig(fsdp=FSDPConfig(**keys)))
    with older("set_reduce_scatter_max_input_buffers", "set_separate_reduce_scatter_group"):
        built(context.mesh)
        with pytest.raises(
            UserError, match=r"^parallel\.fsdp\.reduce_scatters_in_flight = 2: needs PyTorch 2.13.*to 1$"
        ):
            built(context.mesh, reduce_scatters_in_flight=2)
    mesh = build_mesh(ParallelConfig(expert=2), torch.device("cpu"))
    block = experts(built(mesh))[0]
    for group in block._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator, union-attr]
        del group._reduce_scatter_comm
    with pytest.raises(UserError, match=r'^parallel\.fsdp\.reduce_dtype = "bfloat16": not possible .*to "float32"$'):
        set_reduce_scatter(block, BFloat16Wire())  # type: ignore[arg-type]
