//! What an operation sees when it runs on the CPU: its buffers, and helpers to spread rows over threads.

use super::Real;
use crate::par::*;
use std::marker::PhantomData;

/// A buffer as an operation sees it.
#[derive(Clone, Copy)]
pub enum Slot<T> {
    /// Floats.
    F(*mut T, usize),
    /// Bits of 16-bit floats.
    H(*mut u16, usize),
    /// Ids, offsets: 32-bit unsigned.
    U(*const u32, usize),
}

/// The buffers of one operation, lent by the executor for one call.
pub struct Cpu<'a, T: Real> {
    inputs: Vec<Slot<T>>,
    outputs: Vec<Slot<T>>,
    _life: PhantomData<&'a mut T>,
}

impl<'a, T: Real> Cpu<'a, T> {
    /// Lends buffers to an operation.
    ///
    /// # Safety
    /// For `'a` every pointer is valid for its length; outputs are disjoint from each other and from
    /// every input, except pairs that the operation's `may_alias` lists; inputs that it mutates are
    /// disjoint from everything.
    pub unsafe fn new(inputs: Vec<Slot<T>>, outputs: Vec<Slot<T>>) -> Self {
        Cpu { inputs, outputs, _life: PhantomData }
    }

    /// Number of inputs.
    pub fn n_inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Input `i` as floats. Not for an input that shares its buffer with an output while that is written.
    pub fn input(&self, i: usize) -> &'a [T] {
        match self.inputs[i] {
            // SAFETY: valid and not written during the call, by the contract of `new`.
            Slot::F(p, n) => unsafe { std::slice::from_raw_parts(p, n) },
            _ => panic!("input {i} holds no floats of the executor's"),
        }
    }

    /// Input `i` as the bits of 16-bit floats.
    pub fn halves(&self, i: usize) -> &'a [u16] {
        match self.inputs[i] {
            // SAFETY: valid and not written during the call, by the contract of `new`.
            Slot::H(p, n) => unsafe { std::slice::from_raw_parts(p, n) },
            _ => panic!("input {i} holds no 16-bit floats"),
        }
    }

    /// Output `i` as the bits of 16-bit floats.
    pub fn output_halves(&mut self, i: usize) -> &'a mut [u16] {
        match self.outputs[i] {
            // SAFETY: valid and disjoint by the contract of `new`; one call per output per operation.
            Slot::H(p, n) => unsafe { std::slice::from_raw_parts_mut(p, n) },
            _ => panic!("output {i} holds no 16-bit floats"),
        }
    }

    /// Input `i` as ids.
    pub fn ids(&self, i: usize) -> &'a [u32] {
        match self.inputs[i] {
            // SAFETY: valid and not written during the call, by the contract of `new`.
            Slot::U(p, n) => unsafe { std::slice::from_raw_parts(p, n) },
            _ => panic!("input {i} holds floats, not ids"),
        }
    }

    /// Address and length of input `i`, for operations that may run in place.
    pub fn input_raw(&self, i: usize) -> (*const T, usize) {
        match self.inputs[i] {
            Slot::F(p, n) => (p as *const T, n),
            _ => panic!("input {i} holds no floats of the executor's"),
        }
    }

    /// Output `i`. Its contents are whatever the buffer held before.
    pub fn output(&mut self, i: usize) -> &'a mut [T] {
        match self.outputs[i] {
            // SAFETY: valid and disjoint by the contract of `new`; one call per output per operation.
            Slot::F(p, n) => unsafe { std::slice::from_raw_parts_mut(p, n) },
            _ => panic!("output {i} holds no floats of the executor's"),
        }
    }

    /// A state that the operation updates in place (listed in its `mutates`).
    pub fn state(&mut self, i: usize) -> &'a mut [T] {
        match self.inputs[i] {
            // SAFETY: valid and disjoint from every other buffer, by the contract of `new`.
            Slot::F(p, n) => unsafe { std::slice::from_raw_parts_mut(p, n) },
            _ => panic!("input {i} holds no floats of the executor's"),
        }
    }
}

/// How many rows of `width` elements one task takes: about 32 KiB of them, a fixed number, so that results
/// do not depend on the number of threads.
pub fn rows_per_task(width: usize) -> usize {
    (8192 / width.max(1)).max(1)
}

/// Runs `f(first_row, rows)` over consecutive blocks of `out`, `width` elements a row, on all threads.
pub fn par_rows<T: Real>(out: &mut [T], width: usize, f: impl Fn(usize, &mut [T]) + Send + Sync) {
    let block = rows_per_task(width);
    out.par_chunks_mut(block * width).enumerate().for_each(|(i, c)| {
        T::simd(
            #[inline(always)]
            || f(i * block, c),
        )
    });
}

/// The same over two outputs that advance together (`w0` and `w1` elements a row).
pub fn par_rows2<T: Real>(
    a: &mut [T],
    w0: usize,
    b: &mut [T],
    w1: usize,
    f: impl Fn(usize, &mut [T], &mut [T]) + Send + Sync,
) {
    let block = rows_per_task(w0.max(w1));
    a.par_chunks_mut(block * w0).zip(b.par_chunks_mut(block * w1)).enumerate().for_each(|(i, (x, y))| {
        T::simd(
            #[inline(always)]
            || f(i * block, x, y),
        )
    });
}

/// Sums over rows: splits `rows` in fixed chunks, lets `f(range, partial)` add into a zeroed partial of
/// `out.len()` elements, and adds the partials in order into `out` (overwritten). Deterministic.
pub fn par_reduce_rows<T: Real>(
    rows: usize,
    per_task: usize,
    out: &mut [T],
    f: impl Fn(std::ops::Range<usize>, &mut [T]) + Send + Sync,
) {
    let per_task = per_task.max(1).max(rows.div_ceil(64));
    let parts: Vec<Vec<T>> = (0..rows.div_ceil(per_task))
        .into_par_iter()
        .map(|i| {
            let mut p = vec![T::ZERO; out.len()];
            T::simd(
                #[inline(always)]
                || f(i * per_task..((i + 1) * per_task).min(rows), &mut p),
            );
            p
        })
        .collect();
    out.fill(T::ZERO);
    for p in &parts {
        for (o, v) in out.iter_mut().zip(p) {
            *o += *v;
        }
    }
}
