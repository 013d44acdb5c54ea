//! What a [`Schedule`](super::schedule::Schedule) works on: where the bytes of a step come from, and what becomes of those
//! that arrive.

use super::element::{Element, Reduction};
use super::schedule::{Action, Cut, Step};
use super::wire::Wire;
use bytemuck::{cast_slice, cast_slice_mut};
use std::collections::HashMap;
use std::ops::Range;

/// The data of one operation in progress.
pub trait Work {
    /// Bytes of a step's frame.
    fn len(&self, step: &Step) -> usize;
    /// What a sending step sends, where that lies in memory as it travels.
    fn view(&self, step: &Step) -> Option<&[u8]>;
    /// Appends what a sending step sends.
    fn encode(&mut self, step: &Step, out: &mut Vec<u8>);
    /// Where a receiving step's bytes may be written as they come.
    fn destination(&mut self, step: &Step) -> Option<&mut [u8]>;
    /// Takes a receiving step's bytes, all of them, at an address that is a multiple of 8.
    fn absorb(&mut self, step: &Step, bytes: &[u8]);
}

/// Elements that travel as they are and change in place.
#[derive(Debug)]
pub struct InPlace<'a, T> {
    /// The data.
    pub data: &'a mut [T],
    /// How arriving elements are combined with them.
    pub how: Reduction,
}

impl<T: Element> Work for InPlace<'_, T> {
    fn len(&self, step: &Step) -> usize {
        step.range.len() * size_of::<T>()
    }
    fn view(&self, step: &Step) -> Option<&[u8]> {
        (step.action != Action::SendCopy).then(|| cast_slice(&self.data[step.range.clone()]))
    }
    fn encode(&mut self, step: &Step, out: &mut Vec<u8>) {
        out.extend_from_slice(cast_slice(&self.data[step.range.clone()]));
    }
    fn destination(&mut self, step: &Step) -> Option<&mut [u8]> {
        (step.action == Action::Store).then(|| cast_slice_mut(&mut self.data[step.range.clone()]))
    }
    fn absorb(&mut self, step: &Step, bytes: &[u8]) {
        let mine = &mut self.data[step.range.clone()];
        match step.action {
            Action::Store => cast_slice_mut::<T, u8>(mine).copy_from_slice(bytes),
            _ => T::combine(self.how, mine, cast_slice(bytes)),
        }
    }
}

/// A sum of f32 in a narrow wire format.
#[derive(Debug)]
pub struct Narrow<'a> {
    /// The data, which become the sum.
    data: &'a mut [f32],
    wire: Wire,
    /// Finished frames by where they begin: encoded once, the same for every peer.
    sealed: HashMap<usize, Vec<u8>>,
    /// What rounding took away, by element.
    lost: Option<&'a mut [f32]>,
}

impl<'a> Narrow<'a> {
    /// Adds what was lost last time, if that is kept.
    ///
    /// # Panics
    /// If `lost` has another length than `data`.
    pub fn new(data: &'a mut [f32], wire: Wire, lost: Option<&'a mut [f32]>) -> Self {
        if let Some(lost) = &lost {
            assert_eq!(lost.len(), data.len());
            data.iter_mut().zip(lost.iter()).for_each(|(d, e)| *d += *e);
        }
        Narrow { data, wire, sealed: HashMap::new(), lost }
    }

    /// Rounds a stretch as it travels, in frames of `cut`.
    pub fn round(&mut self, range: Range<usize>, cut: Cut) {
        let mut bytes = vec![];
        for v in self.data[range].chunks_mut(cut.chunk) {
            bytes.clear();
            self.wire.encode(v, &mut bytes);
            self.wire.store(&bytes, v);
        }
    }

    fn keep_error(wire: Wire, exact: &[f32], bytes: &[u8], lost: &mut [f32]) {
        wire.store(bytes, lost);
        for (e, x) in lost.iter_mut().zip(exact) {
            let d = x - *e;
            // one bad step must not stay for ever
            *e = if d.is_finite() { d } else { 0.0 };
        }
    }
}

impl Work for Narrow<'_> {
    fn len(&self, step: &Step) -> usize {
        self.wire.len(step.range.len())
    }
    fn view(&self, step: &Step) -> Option<&[u8]> {
        (step.action == Action::SendSealed).then(|| &self.sealed[&step.range.start][..])
    }
    fn encode(&mut self, step: &Step, out: &mut Vec<u8>) {
        let begin = out.len();
        let exact = &self.data[step.range.clone()];
        self.wire.encode(exact, out);
        if let Some(lost) = &mut self.lost {
            Self::keep_error(self.wire, exact, &out[begin..], &mut lost[step.range.clone()]);
        }
    }
    fn destination(&mut self, _: &Step) -> Option<&mut [u8]> {
        None
    }
    fn absorb(&mut self, step: &Step, bytes: &[u8]) {
        let mine = &mut self.data[step.range.clone()];
        match step.action {
            Action::Store => self.wire.store(bytes, mine),
            _ => self.wire.add(bytes, mine),
        }
        if step.action == Action::AddSeal {
            let mut frame = Vec::with_capacity(self.wire.len(mine.len()));
            self.wire.encode(mine, &mut frame);
            if let Some(lost) = &mut self.lost {
                Self::keep_error(self.wire, mine, &frame, &mut lost[step.range.clone()]);
            }
            self.wire.store(&frame, mine);
            self.sealed.insert(step.range.start, frame);
        }
    }
}

/// From one place to another: `all_to_all`, `send`, `receive`.
#[derive(Debug)]
pub struct Between<'a, T> {
    /// What is sent; sending steps count in it.
    pub from: &'a [T],
    /// What is received; receiving steps count in it.
    pub into: &'a mut [T],
}

impl<T: Element> Work for Between<'_, T> {
    fn len(&self, step: &Step) -> usize {
        step.range.len() * size_of::<T>()
    }
    fn view(&self, step: &Step) -> Option<&[u8]> {
        Some(cast_slice(&self.from[step.range.clone()]))
    }
    fn encode(&mut self, step: &Step, out: &mut Vec<u8>) {
        out.extend_from_slice(cast_slice(&self.from[step.range.clone()]));
    }
    fn destination(&mut self, step: &Step) -> Option<&mut [u8]> {
        Some(cast_slice_mut(&mut self.into[step.range.clone()]))
    }
    fn absorb(&mut self, step: &Step, bytes: &[u8]) {
        cast_slice_mut::<T, u8>(&mut self.into[step.range.clone()]).copy_from_slice(bytes);
    }
}

/// [`Between`] for f32 in a narrow wire format.
#[derive(Debug)]
pub struct NarrowBetween<'a> {
    /// See [`Between`].
    pub from: &'a [f32],
    /// See [`Between`].
    pub into: &'a mut [f32],
    /// The format.
    pub wire: Wire,
}

impl Work for NarrowBetween<'_> {
    fn len(&self, step: &Step) -> usize {
        self.wire.len(step.range.len())
    }
    fn view(&self, _: &Step) -> Option<&[u8]> {
        None
    }
    fn encode(&mut self, step: &Step, out: &mut Vec<u8>) {
        self.wire.encode(&self.from[step.range.clone()], out);
    }
    fn destination(&mut self, _: &Step) -> Option<&mut [u8]> {
        None
    }
    fn absorb(&mut self, step: &Step, bytes: &[u8]) {
        self.wire.store(bytes, &mut self.into[step.range.clone()]);
    }
}

/// Bytes at an address that is a multiple of 8.
#[derive(Debug, Default)]
pub struct Aligned {
    words: Vec<u64>,
}

impl Aligned {
    /// `n` bytes, whose content is whatever was there.
    pub fn bytes(&mut self, n: usize) -> &mut [u8] {
        if self.words.len() * 8 < n {
            self.words.resize(n.div_ceil(8), 0);
        }
        &mut cast_slice_mut(&mut self.words)[..n]
    }
}
