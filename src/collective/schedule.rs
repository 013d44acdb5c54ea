//! A collective operation as data: which stretches a rank sends to whom, which it receives, and what waits for what.
//!
//! The algorithms here are pure functions from (rank, world, sizes) to a [`Schedule`]; a transport executes it. So every
//! transport has every algorithm, and an algorithm can be tested without one.
//!
//! | used for | algorithm | steps | sent by a rank |
//! |---|---|---|---|
//! | small sums | recursive doubling | log₂ p | n log₂ p |
//! | middle | recursive halving, then doubling (Rabenseifner) | 2 log₂ p | 2n |
//! | large | ring, in chunks that are passed on as they come | 2(p − 1) | 2n(p − 1)/p |
//! | narrow wire formats | direct: each rank sums its own stretch of all others' | 2 | 2n(p − 1)/p |
//!
//! Sums are made in an order that depends on ranks only, so the same inputs give the same bits, and every rank gets the
//! same ones. A narrow format is rounded once on the way to the sum and once on the way back, whatever the world's size.

use std::ops::Range;

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Sends straight from the data.
    Send,
    /// Sends a copy made when the step becomes ready: the data may change before the bytes have left.
    SendCopy,
    /// Sends what [`Action::AddSeal`] made.
    SendSealed,
    /// Overwrites with what arrives.
    Store,
    /// Combines with what arrives.
    Add,
    /// [`Action::Add`], after which the stretch is complete: it is rounded to the wire format, here as for everyone.
    AddSeal,
}

impl Action {
    /// Whether it sends.
    pub fn sends(self) -> bool {
        matches!(self, Action::Send | Action::SendCopy | Action::SendSealed)
    }
}

/// One frame to or from one peer. Frames between two ranks on one lane go in the order of their steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The other rank.
    pub peer: usize,
    /// The stretch, in elements.
    pub range: Range<usize>,
    /// What to do.
    pub action: Action,
    /// The receiving step that must be complete first.
    pub after: Option<usize>,
    /// Which connection to that peer.
    pub lane: usize,
}

/// All steps of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// In the order in which each peer sees them.
    pub steps: Vec<Step>,
}

/// How stretches are cut into frames.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Elements a frame, a multiple of [`super::wire::BLOCK`].
    pub chunk: usize,
    /// Connections to a peer; stretches of more than `8` frames use them all.
    pub lanes: usize,
}

impl Cut {
    fn chunks(self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let count = range.len().div_ceil(self.chunk);
        let lanes = if count > 8 { self.lanes } else { 1 };
        // an empty stretch has no frame
        (0..count).map(move |i| {
            let at = range.start + i * self.chunk;
            (at..range.end.min(at + self.chunk), i % lanes)
        })
    }
}

/// `n` elements in `p` stretches whose lengths differ by one at most.
pub fn even(n: usize, p: usize) -> Vec<Range<usize>> {
    let mut at = 0;
    let ranges = (0..p).map(|i| {
        let len = n / p + usize::from(i < n % p);
        at += len;
        at - len..at
    });
    ranges.collect()
}

/// Stretches of these lengths, one after the other.
pub fn stretches(counts: &[usize]) -> Vec<Range<usize>> {
    let mut at = 0;
    let ranges = counts.iter().map(|n| {
        at += n;
        at - n..at
    });
    ranges.collect()
}

impl Schedule {
    fn push(&mut self, step: Step) -> usize {
        self.steps.push(step);
        self.steps.len() - 1
    }

    /// Frames of a stretch; `after[i]` must precede frame `i`. Returns their steps.
    fn frames(
        &mut self,
        cut: Cut,
        peer: usize,
        range: Range<usize>,
        action: Action,
        after: &[Option<usize>],
    ) -> Vec<Option<usize>> {
        let of = |i: usize| after.get(i.min(after.len().saturating_sub(1))).copied().flatten();
        let frames: Vec<_> = cut.chunks(range).enumerate().collect();
        frames
            .into_iter()
            .map(|(i, (range, lane))| Some(self.push(Step { peer, range, action, after: of(i), lane })))
            .collect()
    }

    /// Sum over a ring: `ranges[i]` is complete on rank `i` afterwards, other stretches hold partial sums.
    pub fn ring_reduce_scatter(rank: usize, ranges: &[Range<usize>], cut: Cut) -> Self {
        let mut s = Schedule::default();
        s.ring_reduce(rank, ranges, cut);
        s
    }

    fn ring_reduce(&mut self, rank: usize, ranges: &[Range<usize>], cut: Cut) -> Vec<Option<usize>> {
        let p = ranges.len();
        let (right, left) = ((rank + 1) % p, (rank + p - 1) % p);
        let mut before = vec![];
        for step in 0..p - 1 {
            let out = ranges[(rank + 2 * p - 1 - step) % p].clone();
            let into = ranges[(rank + 2 * p - 2 - step) % p].clone();
            self.frames(cut, right, out, Action::Send, &before);
            before = self.frames(cut, left, into, Action::Add, &[]);
        }
        before
    }

    /// Each rank's stretch goes round the ring. `before`: what must precede the first.
    fn ring_gather(
        &mut self,
        rank: usize,
        ranges: &[Range<usize>],
        cut: Cut,
        mut before: Vec<Option<usize>>,
    ) {
        let p = ranges.len();
        let (right, left) = ((rank + 1) % p, (rank + p - 1) % p);
        for step in 0..p - 1 {
            let out = ranges[(rank + p - step) % p].clone();
            let into = ranges[(rank + 2 * p - 1 - step) % p].clone();
            self.frames(cut, right, out, Action::Send, &before);
            before = self.frames(cut, left, into, Action::Store, &[]);
        }
    }

    /// Gathers stretches over a ring.
    pub fn ring_all_gather(rank: usize, ranges: &[Range<usize>], cut: Cut) -> Self {
        let mut s = Schedule::default();
        s.ring_gather(rank, ranges, cut, vec![]);
        s
    }

    /// Sum over a ring of `n` elements.
    pub fn ring_all_reduce(rank: usize, world: usize, n: usize, cut: Cut) -> Self {
        let ranges = even(n, world);
        let mut s = Schedule::default();
        let last = s.ring_reduce(rank, &ranges, cut);
        s.ring_gather(rank, &ranges, cut, last);
        s
    }

    /// Every rank sends its stretch to every other.
    pub fn direct_all_gather(rank: usize, ranges: &[Range<usize>], cut: Cut) -> Self {
        let p = ranges.len();
        let mut s = Schedule::default();
        for i in 1..p {
            s.frames(cut, (rank + i) % p, ranges[rank].clone(), Action::Send, &[]);
        }
        for i in 1..p {
            let from = (rank + p - i) % p;
            s.frames(cut, from, ranges[from].clone(), Action::Store, &[]);
        }
        s
    }

    /// Every rank sums its own stretch, which all others send to it. With `gather` the sums go back to all.
    ///
    /// The order of terms: its own, then those of ranks r − 1, r − 2, …
    pub fn direct_reduce(rank: usize, ranges: &[Range<usize>], gather: bool, cut: Cut) -> Self {
        let p = ranges.len();
        let mut s = Schedule::default();
        for i in 1..p {
            let to = (rank + i) % p;
            s.frames(cut, to, ranges[to].clone(), Action::Send, &[]);
        }
        // frame by frame, so that a sum is complete as early as it can be
        let mut complete = vec![];
        for (range, lane) in cut.chunks(ranges[rank].clone()) {
            let mut after = None;
            for i in 1..p {
                let last = gather && i == p - 1;
                let action = if last { Action::AddSeal } else { Action::Add };
                let peer = (rank + p - i) % p;
                after = Some(s.push(Step { peer, range: range.clone(), action, after, lane }));
            }
            complete.push(after);
        }
        if gather {
            for i in 1..p {
                s.frames(cut, (rank + i) % p, ranges[rank].clone(), Action::SendSealed, &complete);
            }
            for i in 1..p {
                let from = (rank + p - i) % p;
                s.frames(cut, from, ranges[from].clone(), Action::Store, &[]);
            }
        }
        s
    }

    /// Ranks past the largest power of two give their data to a partner before, and get the result after.
    fn folded(rank: usize, world: usize, n: usize, cut: Cut, inner: impl FnOnce(&mut Self, usize)) -> Self {
        let power = 1 << world.ilog2();
        let mut s = Schedule::default();
        if rank >= power {
            s.frames(cut, rank - power, 0..n, Action::Send, &[]);
            s.frames(cut, rank - power, 0..n, Action::Store, &[]);
            return s;
        }
        let extra = (rank + power < world).then_some(rank + power);
        if let Some(peer) = extra {
            s.frames(cut, peer, 0..n, Action::Add, &[]);
        }
        inner(&mut s, power);
        if let Some(peer) = extra {
            let last = s.last_receipt();
            s.frames(cut, peer, 0..n, Action::Send, &[last]);
        }
        s.one_after_the_other();
        s
    }

    fn last_receipt(&self) -> Option<usize> {
        self.steps.iter().rposition(|s| !s.action.sends())
    }

    /// Every step waits for all receipts before it: for algorithms whose levels build on one another.
    fn one_after_the_other(&mut self) {
        let mut last = None;
        for i in 0..self.steps.len() {
            self.steps[i].after = last;
            if !self.steps[i].action.sends() {
                last = Some(i);
            }
        }
    }

    /// Log₂ p exchanges of everything: for few bytes, which must fit one frame.
    pub fn doubling_all_reduce(rank: usize, world: usize, n: usize, cut: Cut) -> Self {
        Self::folded(rank, world, n, cut, |s, power| {
            let mut distance = 1;
            while distance < power {
                let peer = rank ^ distance;
                s.frames(cut, peer, 0..n, Action::SendCopy, &[]);
                s.frames(cut, peer, 0..n, Action::Add, &[]);
                distance *= 2;
            }
        })
    }

    /// Halves are exchanged and summed down to one stretch a rank, then gathered back the same way.
    pub fn halving_all_reduce(rank: usize, world: usize, n: usize, cut: Cut) -> Self {
        Self::folded(rank, world, n, cut, |s, power| {
            let mut mine = 0..n;
            let mut way = vec![];
            let mut distance = power / 2;
            while distance > 0 {
                let peer = rank ^ distance;
                let middle = mine.start + mine.len() / 2;
                let (low, high) = (mine.start..middle, middle..mine.end);
                let (keep, give) = if rank & distance == 0 { (low, high) } else { (high, low) };
                s.frames(cut, peer, give.clone(), Action::Send, &[]);
                s.frames(cut, peer, keep.clone(), Action::Add, &[]);
                way.push((peer, keep.clone(), give));
                mine = keep;
                distance /= 2;
            }
            for (peer, keep, give) in way.into_iter().rev() {
                s.frames(cut, peer, keep, Action::Send, &[]);
                s.frames(cut, peer, give, Action::Store, &[]);
            }
        })
    }

    /// `sent[i]` of the sent data goes to rank i, `received[i]` of the received data comes from it; the own stretch does
    /// not travel.
    pub fn all_to_all(rank: usize, sent: &[Range<usize>], received: &[Range<usize>], cut: Cut) -> Self {
        let p = sent.len();
        let mut s = Schedule::default();
        let mut before = None;
        for i in 1..p {
            let (to, from) = ((rank + i) % p, (rank + p - i) % p);
            s.frames(cut, to, sent[to].clone(), Action::Send, &[before]);
            let last = s.frames(cut, from, received[from].clone(), Action::Store, &[]).pop().flatten();
            // much to one rank: then to the next when as much has come, so that few stretches are in the caches at once
            // and all do not send to the same one
            if received[from].len() > 8 * cut.chunk {
                before = last;
            }
        }
        s
    }

    /// From `root` down a binomial tree, chunk by chunk.
    pub fn broadcast(rank: usize, world: usize, root: usize, n: usize, cut: Cut) -> Self {
        let mut s = Schedule::default();
        let me = (rank + world - root) % world;
        let real = |r: usize| (r + root) % world;
        let mut mask = 1;
        let mut got = vec![];
        while mask < world {
            if me & mask != 0 {
                got = s.frames(cut, real(me - mask), 0..n, Action::Store, &[]);
                break;
            }
            mask *= 2;
        }
        mask /= 2;
        while mask > 0 {
            if me + mask < world {
                s.frames(cut, real(me + mask), 0..n, Action::Send, &got);
            }
            mask /= 2;
        }
        s
    }

    /// To one peer.
    pub fn send(peer: usize, n: usize, cut: Cut) -> Self {
        let mut s = Schedule::default();
        s.frames(cut, peer, 0..n, Action::Send, &[]);
        s
    }

    /// From one peer.
    pub fn receive(peer: usize, n: usize, cut: Cut) -> Self {
        let mut s = Schedule::default();
        s.frames(cut, peer, 0..n, Action::Store, &[]);
        s
    }
}
