//! In which order rows come, and from where on.

use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The order in which a data set's rows come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// File order.
    Sequential,
    /// The permutation that belongs to the seed and the epoch.
    Shuffled {
        /// The run's seed.
        seed: u64,
        /// The epoch, from 0.
        epoch: u64,
    },
}

/// Rows that are shuffled together where a file is not held in memory.
pub const SHUFFLE_ROWS: usize = 1 << 18;

/// How a loader works.
#[derive(Clone, Copy, Debug)]
pub struct LoaderOptions {
    /// Rows a batch; the last one is padded.
    pub batch: usize,
    /// Batches ready at most while one is used.
    pub prefetch: usize,
    /// Batches to leave out at the start (a run that goes on in the middle of an epoch).
    pub skip: usize,
    /// Which of how many ranks: each makes batches of its share of `ranks` times `batch` rows.
    pub rank: usize,
    /// See `rank`.
    pub ranks: usize,
}

impl LoaderOptions {
    /// The usual: a few batches ahead, from the start.
    pub fn new(batch: usize) -> LoaderOptions {
        LoaderOptions { batch, prefetch: 4, skip: 0, rank: 0, ranks: 1 }
    }

    /// Rows of all ranks' batches together.
    pub fn together(&self) -> usize {
        self.batch * self.ranks
    }

    /// `n` rows by steps of all ranks: each rank's, as even as can be, the last ones of an epoch too.
    pub fn shares(self, n: usize) -> impl Iterator<Item = Vec<Range<usize>>> {
        (0..n).step_by(self.together()).map(move |start| {
            let total = self.together().min(n - start);
            let bound = |rank| start + total * rank / self.ranks;
            (0..self.ranks).map(|rank| bound(rank)..bound(rank + 1)).collect()
        })
    }
}

/// The rows 0..n in the order of a seed and an epoch: the same on every machine.
pub fn permutation(n: u32, seed: u64, epoch: u64) -> Vec<u32> {
    permutation_of_block(n, seed, epoch, 0)
}

/// As [`permutation`], for a block of rows of a stream; that of the first block is the whole stream's, if it is long
/// enough.
pub fn permutation_of_block(n: u32, seed: u64, epoch: u64, block: u64) -> Vec<u32> {
    let mut key = *b"________________birkhoff shuffle";
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    key[16..24].iter_mut().zip(block.to_le_bytes()).for_each(|(k, b)| *k ^= b);
    let mut rng = ChaCha8Rng::from_seed(key);
    let mut order: Vec<u32> = (0..n).collect();
    for last in (1..n).rev() {
        order.swap(last as usize, below(&mut rng, last + 1) as usize);
    }
    order
}

/// A uniform number below `n` (Lemire's method), written out so that no library version changes it.
fn below(rng: &mut ChaCha8Rng, n: u32) -> u32 {
    let threshold = n.wrapping_neg() % n;
    loop {
        let product = u64::from(rng.next_u32()) * u64::from(n);
        if product as u32 >= threshold {
            return (product >> 32) as u32;
        }
    }
}
