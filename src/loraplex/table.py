"""Where the adapters of one layer are: a device table of pointers, ranks and scales."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor

from loraplex import env
from loraplex.checks import (
    REFERENCE_DTYPES,
    Spans,
    check_device,
    check_dtype,
    check_int,
    check_memory,
    check_number,
    check_per_slice,
    check_per_slot,
    check_rank_multiple,
    check_rows,
    check_same,
    check_shape,
    check_slices,
    check_tensor,
    check_tensors,
    check_usable_device,
    dtype_name,
    is_aligned,
    rank_multiple_of,
    settle_rank_multiple,
)
from loraplex.counters import reserve_counters

# One record of eight int64 (64 bytes) per slot and slice; the kernels read the same numbers.
ENTRY_FIELDS = 8
A_PTR, A_STRIDE, B_PTR, B_STRIDE, RANK, SCALING, COLUMN_SCALE_PTR, BIAS_PTR = range(ENTRY_FIELDS)


class AdapterTable:
    """Pointers, ranks and scales of every adapter slot of one layer, read inside the kernels.

    Semantics, for a row with slot l and a slice s of the layer::

        y = column_scale[l, s] * (x @ W[s].T + scaling[l, s] * (x @ A[l, s].T) @ B[l, s].T)
            + bias + adapter_bias[l, s]

    The table keeps the tensors that it points into alive. Entries change in place (:meth:`set_`,
    :meth:`clear_`, or a pool writing ``entries``), so captured CUDA graphs stay valid.

    Attributes:
        entries: int64 [L, S, 8], the records; see the field numbers in this module.
        in_features: K.
        slices: widths of the layer's outputs; their sum is N.
        max_rank: R_max, no entry has a larger rank.
        rank_multiple: 8 if every rank is a multiple of 8 with 16-byte-aligned rows, which lets
            kernels load whole vectors; 1 if ranks and layouts are arbitrary.

    Example:
        >>> import torch, loraplex as lp
        >>> a, b = torch.randn(3, 16, 64), torch.randn(3, 48, 16)
        >>> lp.AdapterTable.from_pools(a, b, scaling=torch.tensor([1.0, 0.5, 2.0]))
        AdapterTable(num_adapters=3, in_features=64, slices=(48,), max_rank=16, dtype=float32, device='cpu')
    """  # noqa: E501

    def __init__(
        self,
        entries: Tensor,
        in_features: int,
        slices: tuple[int, ...],
        *,
        max_rank: int,
        dtype: torch.dtype,
        rank_multiple: int,
        has_column_scale: bool,
        has_bias: bool,
        storages: list[Tensor],
    ) -> None:
        self.entries = entries
        self.num_adapters = entries.shape[0]
        self.in_features = in_features
        self.slices = slices
        self.out_features = sum(slices)
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = entries.device
        self.rank_multiple = rank_multiple
        self.has_column_scale = has_column_scale
        self.has_bias = has_bias
        self.storages = storages
        self._fixed = list(storages)
        reserve_counters(entries.device)
        self._held: dict[int, list[Tensor]] = {}
        self._spans: Spans | None = None

    @classmethod
    def from_pools(
        cls,
        a_pool: Tensor,
        b_pool: Tensor,
        slices: Sequence[int] | None = None,
        scaling: Tensor | Sequence[float] | None = None,
        ranks: Tensor | Sequence[int] | None = None,
        column_scale: Tensor | None = None,
        bias: Tensor | None = None,
        rank_multiple: int | None = None,
    ) -> AdapterTable:
        """Table over two dense pools, used in place without a copy.

        Args:
            a_pool: [L, S*R_max, K], slice s of slot l in rows s*R_max .. s*R_max+rank; any strides.
            b_pool: [L, N, R_max], columns 0..rank; same dtype and device as ``a_pool``.
            slices: widths of the slices, summing to N; one slice of width N if None.
            scaling: float [L], 1.0 if None.
            ranks: int [L] between 0 and R_max, R_max if None; 0 = slot without adapter.
            column_scale: float32 [L, N], see the class (DoRA); ones if None.
            bias: float32 [L, N], added to the rows of an adapter; zeros if None.
            rank_multiple: 1 or 8, see the class; found from ``ranks`` and the layout if None, for
                which ``ranks`` on a GPU are read once.

        Scaling and ranks are copied; the pools, ``column_scale`` and ``bias`` are referred to.
        Rows of A and columns of B past a rank may hold anything and never reach a result; up to it,
        B must be finite, or other rows of a batch may get NaN.

        Raises:
            TypeError, ValueError: an argument has the wrong type, dtype, device or shape, or a
                rank lies outside 0..R_max (seen on a GPU only where ranks are read anyway, or if
                ``LORAPLEX_DEBUG=1``).
        """
        check_dtype("a_pool", check_tensor("a_pool", a_pool), REFERENCE_DTYPES)
        check_shape("a_pool", a_pool, ["L", "S*R_max", "K"])
        check_same("b_pool", check_tensor("b_pool", b_pool), "a_pool", a_pool)
        for name, pool in (("a_pool", a_pool), ("b_pool", b_pool)):
            check_memory(name, pool)
        num_adapters, _, in_features = a_pool.shape
        check_shape("b_pool", b_pool, [num_adapters, "N", "R_max"])
        _, out_features, max_rank = b_pool.shape
        widths = check_slices(slices, out_features)
        check_shape("a_pool", a_pool, [num_adapters, len(widths) * max_rank, "K"])
        device = a_pool.device
        rank_list, rank_row = check_per_slot(
            "ranks", ranks, num_adapters, max_rank, device, torch.int64
        )
        _, scale_row = check_per_slot("scaling", scaling, num_adapters, 1.0, device, torch.float32)
        for name, extra in (("column_scale", column_scale), ("bias", bias)):
            if extra is not None:
                check_rows(name, extra, num_adapters, out_features, device)
        if rank_list is None and (rank_multiple is None or env.is_debug()):
            rank_list = [int(r) for r in rank_row.tolist()]
        for slot, rank in enumerate(rank_list or ()):
            check_int(f"ranks[{slot}]", rank, 0, max_rank)
        # a rank that nobody has read must not lead a kernel out of the pools
        rank_row = rank_row.clamp(0, max_rank)
        fitting = rank_multiple_of(a_pool, b_pool, max_rank, rank_list or [])

        entries = _pool_entries(a_pool, b_pool, widths, max_rank)
        entries[:, :, RANK] = rank_row[:, None]
        entries[:, :, SCALING] = (scale_row.view(torch.int32).long() & 0xFFFFFFFF)[:, None]
        for field, extra in ((COLUMN_SCALE_PTR, column_scale), (BIAS_PTR, bias)):
            if extra is not None:
                entries[:, :, field] = _row_pointers(extra, widths)
        table = cls(
            entries,
            in_features,
            widths,
            max_rank=max_rank,
            dtype=a_pool.dtype,
            rank_multiple=settle_rank_multiple(rank_multiple, fitting),
            has_column_scale=column_scale is not None,
            has_bias=bias is not None,
            storages=[t for t in (a_pool, b_pool, column_scale, bias) if t is not None],
        )
        table.a_inner_stride, table.b_inner_stride = a_pool.stride(2), b_pool.stride(2)
        return table

    @classmethod
    def allocate(
        cls,
        num_adapters: int,
        in_features: int,
        slices: Sequence[int],
        *,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
        has_column_scale: bool = False,
        has_bias: bool = False,
        rank_multiple: int = 8,
        entries: Tensor | None = None,
        storages: Sequence[Tensor] = (),
    ) -> AdapterTable:
        """Table of empty slots (rank 0), to be filled by :meth:`set_` or through ``entries``.

        Args:
            max_rank: R_max, the largest rank any entry will have.
            rank_multiple: 8 promises ranks that are multiples of 8 and 16-byte-aligned rows.
            entries: int64 [L, S, 8] to use instead of new memory, e.g. a view into a pool's own
                metadata; the last two axes must be dense. Cleared here.
            storages: tensors that entries written by a pool will point into.

        Raises:
            TypeError, ValueError: an argument has the wrong type, dtype, device or shape.
        """
        check_int("num_adapters", num_adapters, 0)
        check_int("in_features", in_features, 1)
        check_int("max_rank", max_rank, 0)
        widths = check_slices(slices, None)
        if dtype not in REFERENCE_DTYPES:
            raise TypeError(f"dtype must be a floating dtype of 32, 16 or 64 bits, got {dtype}")
        where = check_usable_device("device", device)
        kept = check_tensors("storages", storages)
        shape = (num_adapters, len(widths), ENTRY_FIELDS)
        if entries is None:
            entries = torch.zeros(shape, dtype=torch.int64, device=where)
        else:
            check_dtype("entries", check_tensor("entries", entries), (torch.int64,))
            check_shape("entries", entries, shape)
            check_device("entries", entries, "the table", where)
            if entries.stride()[1:] != (ENTRY_FIELDS, 1):
                raise ValueError(
                    f"entries must be dense in its last two axes, got strides {entries.stride()}"
                )
            entries.zero_()
        return cls(
            entries,
            in_features,
            widths,
            max_rank=max_rank,
            dtype=dtype,
            rank_multiple=check_rank_multiple(rank_multiple),
            has_column_scale=has_column_scale,
            has_bias=has_bias,
            storages=kept,
        )

    a_inner_stride: int = 1
    b_inner_stride: int = 1

    def set_(
        self,
        slot: int,
        a: Sequence[Tensor | None],
        b: Sequence[Tensor | None],
        scaling: float | Sequence[float] = 1.0,
        column_scale: Sequence[Tensor | None] | None = None,
        bias: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Point one slot at an adapter's tensors, one A and B per slice; None = absent slice.

        Args:
            slot: between 0 and L - 1.
            a: per slice [rank, K] with a dense last axis.
            b: per slice [width, rank] with a dense last axis.
            scaling: one for all slices, or one per slice.
            column_scale: per slice float32 [width]; bias: per slice float32 [width].

        Raises:
            TypeError, ValueError: an argument breaks these rules or the table's ``rank_multiple``;
                the table is unchanged then.
        """
        check_int("slot", slot, 0, self.num_adapters - 1)
        count = len(self.slices)
        nothing: list[Tensor | None] = [None] * count
        factors = scaling if isinstance(scaling, Sequence) else [scaling] * count
        scales = nothing if column_scale is None else column_scale
        biases = nothing if bias is None else bias
        parts = {"a": a, "b": b, "scaling": factors, "column_scale": scales, "bias": biases}
        for name, part in parts.items():
            check_per_slice(name, part, count)
        records, held = [], []
        for s in range(count):
            a_s, b_s = self._check_pair(s, a[s], b[s])
            self._check_vector("column_scale", scales[s], s, self.has_column_scale)
            self._check_vector("bias", biases[s], s, self.has_bias)
            factor = check_number(f"scaling[{s}]", factors[s])
            records.append(self.pack_entry(a_s, b_s, factor, scales[s], biases[s]))
            held += [t for t in (a_s, b_s, scales[s], biases[s]) if t is not None]
        self.entries[slot].copy_(torch.tensor(records, dtype=torch.int64))
        self._hold(slot, held)

    def clear_(self, slot: int) -> None:
        """Make one slot empty (rank 0) and let its tensors go."""
        check_int("slot", slot, 0, self.num_adapters - 1)
        self.entries[slot].zero_()
        self._hold(slot, [])

    @staticmethod
    def pack_entry(
        a: Tensor | None,
        b: Tensor | None,
        scaling: float,
        column_scale: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> list[int]:
        """The eight numbers of one (slot, slice); tensors as in :meth:`set_`."""
        scale_bits = struct.unpack("<I", struct.pack("<f", scaling))[0]
        record = [0, 0, 0, 0, 0, scale_bits, 0, 0]
        if a is not None and b is not None and a.shape[0] > 0:
            record[A_PTR], record[A_STRIDE] = a.data_ptr(), a.stride(0)
            record[B_PTR], record[B_STRIDE] = b.data_ptr(), b.stride(0)
            record[RANK] = a.shape[0]
        record[COLUMN_SCALE_PTR] = 0 if column_scale is None else column_scale.data_ptr()
        record[BIAS_PTR] = 0 if bias is None else bias.data_ptr()
        return record

    def _check_pair(
        self, s: int, a: Tensor | None, b: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if a is None or b is None:
            if a is not None or b is not None:
                raise ValueError(f"a[{s}] and b[{s}] must both be given or both be None")
            return None, None
        check_shape(f"a[{s}]", check_tensor(f"a[{s}]", a), ["rank", self.in_features])
        rank = a.shape[0]
        check_shape(f"b[{s}]", check_tensor(f"b[{s}]", b), [self.slices[s], rank])
        check_int(f"rank of a[{s}]", rank, 0, self.max_rank)
        for name, tensor in ((f"a[{s}]", a), (f"b[{s}]", b)):
            check_dtype(name, tensor, (self.dtype,))
            check_device(name, tensor, "the table", self.device)
            check_memory(name, tensor)
            if tensor.shape[1] > 1 and tensor.stride(1) != 1:
                raise ValueError(
                    f"{name} must be dense in its last axis, got strides {tensor.stride()}"
                )
            if rank % self.rank_multiple or (self.rank_multiple > 1 and not is_aligned(tensor)):
                raise ValueError(
                    f"{name} must have a rank that is a multiple of rank_multiple = "
                    f"{self.rank_multiple} and 16-byte-aligned rows, got rank {rank} and row "
                    f"stride {tensor.stride(0)}; rank_multiple=1 allows other layouts"
                )
        return a, b

    def _check_vector(self, name: str, value: Tensor | None, s: int, is_allowed: bool) -> None:
        if value is None:
            return
        if not is_allowed:
            raise ValueError(f"{name} needs a table allocated with has_{name}=True")
        check_dtype(f"{name}[{s}]", check_tensor(f"{name}[{s}]", value), (torch.float32,))
        check_shape(f"{name}[{s}]", value, [self.slices[s]])
        check_device(f"{name}[{s}]", value, "the table", self.device)
        check_memory(f"{name}[{s}]", value)
        if not value.is_contiguous():
            raise ValueError(f"{name}[{s}] must be contiguous, got strides {value.stride()}")

    def _hold(self, slot: int, tensors: list[Tensor]) -> None:
        self._held[slot] = tensors
        self.storages = self._fixed + [t for held in self._held.values() for t in held]
        self._spans = None

    def is_clear_of(self, tensor: Tensor) -> bool:
        """Whether a tensor surely shares no memory with the adapters' tensors."""
        if self._spans is None:
            self._spans = Spans(self.storages)
        return self._spans.is_clear(tensor)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Addresses mean nothing in a copy, whose tensors lie elsewhere."""
        raise TypeError("an AdapterTable cannot be copied or pickled; make one over copied pools")

    def __repr__(self) -> str:
        return (
            f"AdapterTable(num_adapters={self.num_adapters}, in_features={self.in_features}, "
            f"slices={self.slices}, max_rank={self.max_rank}, dtype={dtype_name(self.dtype)}, "
            f"device={str(self.device)!r})"
        )


def _pool_entries(a_pool: Tensor, b_pool: Tensor, widths: Sequence[int], max_rank: int) -> Tensor:
    """Entries of all slots with the pointers and strides of A and B."""
    device, size = a_pool.device, a_pool.element_size()
    number = torch.arange(a_pool.shape[0], device=device)
    entries = torch.zeros(
        (a_pool.shape[0], len(widths), ENTRY_FIELDS), dtype=torch.int64, device=device
    )
    start = 0
    for s, width in enumerate(widths):
        row = entries[:, s]
        a_offset = number * a_pool.stride(0) + s * max_rank * a_pool.stride(1)
        b_offset = number * b_pool.stride(0) + start * b_pool.stride(1)
        row[:, A_PTR] = a_pool.data_ptr() + a_offset * size
        row[:, A_STRIDE] = a_pool.stride(1)
        row[:, B_PTR] = b_pool.data_ptr() + b_offset * size
        row[:, B_STRIDE] = b_pool.stride(1)
        start += width
    return entries


def _row_pointers(rows: Tensor, widths: Sequence[int]) -> Tensor:
    """Address of each slice in each row of float32 [L, N]."""
    number = torch.arange(rows.shape[0], device=rows.device)
    starts = [sum(widths[:s]) for s in range(len(widths))]
    slots = rows.data_ptr() + rows.element_size() * rows.stride(0) * number
    return torch.stack([slots + rows.element_size() * start for start in starts], dim=1)
