//! Categorical values to ids: 0 = out-of-vocabulary, 1 = missing, from 2 on the values
//! (vocabulary: by falling count, then by bytes; hash: 2 + hash mod buckets).

use xxhash_rust::xxh3::xxh3_64;

use super::columns::{BATCH, word_before};
use super::error::DataError;
use super::profile::Coverage;
use super::schema::{CategoricalColumn, Encoding};
use super::value::{Form, FormFinder};

/// Id of a value that the vocabulary does not have.
pub const OOV: u32 = 0;
/// Id of a missing value.
pub const MISSING: u32 = 1;
/// Id of the first value.
pub const FIRST_VALUE: u32 = 2;

/// A set of byte strings numbered in order of insertion: one arena and an open-addressing table,
/// about 24 bytes a value on top of its text. Values of up to 8 bytes (most of a click log's) lie in the table
/// itself, so that a lookup touches one place in memory.
#[derive(Clone, Debug, Default)]
pub struct Interner {
    bytes: Vec<u8>,
    /// End of each value in `bytes`.
    ends: Vec<usize>,
    /// The length is a power of two.
    slots: Vec<Slot>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// The value itself, or the hash of a longer one.
    key: u64,
    /// Length of the value, or [`LONG`].
    length: u32,
    /// Number + 1; 0 marks a free slot.
    entry: u32,
}

/// Marks a slot whose key is a hash.
const LONG: u32 = u32::MAX;

/// What a value is found by: key and length as in [`Slot`].
#[inline(always)]
fn key_of(value: &[u8]) -> (u64, u32) {
    match value.len() {
        n @ ..=8 => (word_before(value, n).unbounded_shr(64 - 8 * n as u32), n as u32),
        _ => (xxh3_64(value), LONG),
    }
}

/// Where a key's search starts in 2^`bits` slots: the top of a product hangs on every bit of the key.
#[inline(always)]
fn spread(key: u64, length: u32, bits: u32) -> usize {
    let product = (key ^ u64::from(length)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product.unbounded_shr(64 - bits) as usize
}

impl Interner {
    /// The most values a set can hold, so that every id fits below `u32::MAX`.
    const MOST: usize = (u32::MAX - 2 * FIRST_VALUE) as usize;

    /// Number of values.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The value numbered `i`.
    pub fn value(&self, i: usize) -> &[u8] {
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        &self.bytes[start..self.ends[i]]
    }

    /// The number of a value.
    #[inline(always)]
    pub fn get(&self, value: &[u8]) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        let (key, length) = key_of(value);
        self.slots[self.find(value, key, length)].entry.checked_sub(1)
    }

    /// The number of a value, given a new one if needed; `None` when no number is left.
    pub fn intern(&mut self, value: &[u8]) -> Option<u32> {
        if self.ends.len() * 4 >= self.slots.len() * 3 {
            self.grow();
        }
        let (key, length) = key_of(value);
        let slot = self.find(value, key, length);
        if let Some(number) = self.slots[slot].entry.checked_sub(1) {
            return Some(number);
        }
        if self.len() >= Self::MOST {
            return None;
        }
        self.bytes.extend_from_slice(value);
        self.ends.push(self.bytes.len());
        let entry = self.len() as u32;
        self.slots[slot] = Slot { key, length, entry };
        Some(entry - 1)
    }

    /// The slot that holds `value`, or the free slot where it belongs.
    #[inline(always)]
    fn find(&self, value: &[u8], key: u64, length: u32) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = spread(key, length, self.slots.len().trailing_zeros());
        loop {
            let slot = self.slots[at];
            let same = slot.key == key && slot.length == length;
            if slot.entry == 0 || (same && (length != LONG || self.value(slot.entry as usize - 1) == value)) {
                return at;
            }
            at = (at + 1) & mask;
        }
    }

    fn grow(&mut self) {
        self.spread_over((self.slots.len() * 2).max(16));
    }

    /// Puts the values into a new table of `size` slots, the first ones first.
    fn spread_over(&mut self, size: usize) {
        let mut old = std::mem::take(&mut self.slots);
        old.retain(|s| s.entry != 0);
        old.sort_unstable_by_key(|s| s.entry);
        self.slots = vec![Slot::default(); size];
        let (mask, bits) = (size - 1, size.trailing_zeros());
        for slot in old {
            let mut at = spread(slot.key, slot.length, bits);
            while self.slots[at].entry != 0 {
                at = (at + 1) & mask;
            }
            self.slots[at] = slot;
        }
    }

    /// Makes lookups faster when no value is to come: at most half of the table is full, and the first values, in a
    /// vocabulary the frequent ones, are where their search begins.
    fn settle(&mut self) {
        if !self.is_empty() {
            self.spread_over((2 * self.len()).next_power_of_two());
        }
    }
}

/// Counts the values of one column and makes its vocabulary.
#[derive(Clone, Debug, Default)]
pub struct Counter {
    values: Interner,
    counts: Vec<u64>,
}

impl Counter {
    /// Counts one present value; `false` when there are more distinct values than ids.
    #[must_use]
    pub fn count(&mut self, value: &[u8]) -> bool {
        let Some(number) = self.values.intern(value) else { return false };
        match self.counts.get_mut(number as usize) {
            Some(count) => *count += 1,
            None => self.counts.push(1),
        }
        true
    }

    /// Distinct values so far.
    pub fn distinct(&self) -> usize {
        self.values.len()
    }

    /// Shows every value to `finder`.
    pub fn find_form(&self, finder: &mut FormFinder) {
        (0..self.values.len()).for_each(|i| finder.push(self.values.value(i)));
    }

    /// The same counts of the values as `form` writes them.
    #[must_use]
    pub fn in_form(self, form: Form) -> Counter {
        if form == Form::Text {
            return self;
        }
        let mut out = Counter::default();
        for (i, &n) in self.counts.iter().enumerate() {
            let value = self.values.value(i);
            let canonical = form.canonical(value);
            // cannot fail: no more values than there are
            let Some(number) = out.values.intern(canonical.as_ref().map_or(value, |c| c.as_bytes())) else {
                continue;
            };
            match out.counts.get_mut(number as usize) {
                Some(count) => *count += n,
                None => out.counts.push(n),
            }
        }
        out
    }

    /// What the vocabulary of [`Counter::finish`] covers of the values counted.
    pub fn coverage(&self, min_count: u64, max_size: Option<u32>) -> Coverage {
        let most = max_size.map_or(usize::MAX, |m| m as usize);
        let mut largest = vec![];
        let counts = match most < self.counts.len() {
            false => &self.counts[..],
            true => {
                largest.clone_from(&self.counts);
                largest.select_nth_unstable_by(most, |a, b| b.cmp(a));
                &largest[..most]
            }
        };
        let sum = |least: u64| counts.iter().filter(|&&n| n >= least).sum::<u64>();
        let values: u64 = self.counts.iter().sum();
        // without its own row a value has been seen once less
        Coverage { values, unseen: values - sum(min_count), expected: values - sum(min_count + 1) }
    }

    /// The values with at least `min_count` occurrences, at most `max_size` of them, by falling
    /// count, then by bytes.
    pub fn finish(self, min_count: u64, max_size: Option<u32>) -> Interner {
        let (values, counts) = (&self.values, &self.counts);
        let mut kept: Vec<usize> = (0..values.len()).filter(|&i| counts[i] >= min_count).collect();
        kept.sort_unstable_by(|&a, &b| {
            counts[b].cmp(&counts[a]).then_with(|| values.value(a).cmp(values.value(b)))
        });
        kept.truncate(max_size.map_or(usize::MAX, |m| m as usize));
        let mut vocabulary = Interner::default();
        for i in kept {
            // Cannot fail: no more values than `self.values` holds.
            vocabulary.intern(values.value(i));
        }
        vocabulary
    }
}

/// Turns one column's values into ids.
#[derive(Clone, Debug)]
pub enum ColumnEncoder {
    /// Ids of the training values, written in their form.
    Vocabulary(Interner, Form),
    /// Hash buckets of the values, written in their form.
    Hash {
        /// The form.
        form: Form,
        /// Column name and NUL, what the hash starts with.
        prefix: Box<[u8]>,
        /// Number of buckets, at least 1.
        buckets: u32,
        /// ⌊2^64 / buckets⌋, or what comes next below: the remainder without a division.
        inverse: u64,
    },
}

/// xxh3_64 of a prefix of up to 8 bytes and a value of 8, as the specification has it for 9 to 16 bytes, without
/// putting the two together in memory: the values of Criteo's log are of that length.
#[inline(always)]
fn hash_of_two(prefix: &[u8], value: u64) -> u64 {
    const FLIP_LOW: u64 = 0x1f67_b3b7_a4a4_4072 ^ 0x78e5_c0cc_4ee6_79cb;
    const FLIP_HIGH: u64 = 0x2172_ffcc_7dd0_5a82 ^ 0x8e24_43f7_7446_08b8;
    let n = prefix.len();
    let first = prefix.iter().rev().fold(0u64, |word, &b| word << 8 | u64::from(b));
    let first = if n < 8 { first | value << (8 * n) } else { first };
    let (low, high) = (first ^ FLIP_LOW, value ^ FLIP_HIGH);
    let product = u128::from(low) * u128::from(high);
    let sum = (n as u64 + 8)
        .wrapping_add(low.swap_bytes())
        .wrapping_add(high)
        .wrapping_add(product as u64 ^ (product >> 64) as u64);
    let sum = (sum ^ sum >> 37).wrapping_mul(0x1656_6791_9e37_79f9);
    sum ^ sum >> 32
}

/// `n mod d`, where `inverse` is ⌊(2^64 − 1) / d⌋: the quotient is then at most 1 too small.
#[inline(always)]
fn remainder(n: u64, d: u32, inverse: u64) -> u32 {
    let quotient = ((u128::from(n) * u128::from(inverse)) >> 64) as u64;
    let rest = n.wrapping_sub(quotient.wrapping_mul(u64::from(d)));
    let less = rest.wrapping_sub(u64::from(d));
    (if rest >= u64::from(d) { less } else { rest }) as u32
}

impl ColumnEncoder {
    /// The encoder of a column; `values` is its vocabulary, where it has one.
    pub fn new(column: &CategoricalColumn, mut values: Interner) -> Result<ColumnEncoder, DataError> {
        // a run of before there were forms had texts
        let form = column.form.unwrap_or_default();
        match column.encoding {
            Encoding::Vocabulary { .. } => {
                values.settle();
                Ok(ColumnEncoder::Vocabulary(values, form))
            }
            Encoding::Hash { buckets: 0 } => Err(DataError::Schema {
                column: column.name.clone(),
                problem: "0 hash buckets, expected at least 1".into(),
            }),
            Encoding::Hash { buckets } => {
                let prefix = [column.name.as_bytes(), &[0]].concat().into();
                let inverse = u64::MAX / u64::from(buckets);
                Ok(ColumnEncoder::Hash { form, prefix, buckets, inverse })
            }
        }
    }

    /// Ids of the values at up to [`BATCH`] ranges of a text.
    #[inline(always)]
    pub(crate) fn ids(&self, text: &[u8], ranges: &[(u32, u32)], ids: &mut [u32; BATCH]) {
        // a bit for each that takes longer: left for the end, or else the loops would be slower for all
        let mut other = 0u64;
        match self {
            ColumnEncoder::Vocabulary(known, form) if !known.is_empty() => {
                // what is not found may be another text of what is there
                let forms = *form != Form::Text;
                let mut keys = [0; BATCH];
                let mut lengths = [0; BATCH];
                for (&(start, end), (key, length)) in ranges.iter().zip(keys.iter_mut().zip(&mut lengths)) {
                    *key = word_before(text, end as usize);
                    *length = end.wrapping_sub(start);
                }
                let bits = known.slots.len().trailing_zeros();
                let mut starts = [0; BATCH];
                for row in 0..BATCH {
                    keys[row] = keys[row].unbounded_shr(64 - 8 * lengths[row].min(8));
                    starts[row] = spread(keys[row], lengths[row], bits);
                }
                for row in 0..ranges.len().min(BATCH) {
                    let slot = &known.slots[starts[row]];
                    // most values are where their search begins
                    let here = (slot.key == keys[row]) & (slot.length == lengths[row]);
                    let id = if here { slot.entry - 1 + FIRST_VALUE } else { OOV };
                    ids[row] = if lengths[row] == 0 { MISSING } else { id };
                    let odd =
                        (!here & ((slot.entry != 0) | forms) & (lengths[row] != 0)) | (lengths[row] > 8);
                    other |= u64::from(odd) << row;
                }
            }
            ColumnEncoder::Hash { form: Form::Text, prefix, buckets, inverse } if prefix.len() <= 8 => {
                for (&(start, end), id) in ranges.iter().zip(ids) {
                    let length = end.wrapping_sub(start);
                    if length != 8 && length != 0 {
                        *id = self.id(&text[start as usize..end as usize]);
                        continue;
                    }
                    let hash = hash_of_two(prefix, word_before(text, end as usize));
                    let bucket = FIRST_VALUE + remainder(hash, *buckets, *inverse);
                    *id = if length == 0 { MISSING } else { bucket };
                }
                return;
            }
            _ => other = u64::MAX.unbounded_shr(64 - ranges.len() as u32),
        }
        while other != 0 {
            let row = other.trailing_zeros() as usize;
            ids[row] = self.id(&text[ranges[row].0 as usize..ranges[row].1 as usize]);
            other &= other - 1;
        }
    }

    /// Id of a value; the empty value is the missing one.
    #[inline(always)]
    pub fn id(&self, value: &[u8]) -> u32 {
        if value.is_empty() {
            return MISSING;
        }
        match self {
            ColumnEncoder::Vocabulary(values, form) => match values.get(value) {
                Some(n) => n + FIRST_VALUE,
                None if *form == Form::Text => OOV,
                None => {
                    let known = form.canonical(value).and_then(|v| values.get(v.as_bytes()));
                    known.map_or(OOV, |n| n + FIRST_VALUE)
                }
            },
            ColumnEncoder::Hash { form, prefix, buckets, inverse } => {
                let canonical = form.canonical(value);
                let value = canonical.as_ref().map_or(value, |v| v.as_bytes());
                let hash = match <[u8; 8]>::try_from(value) {
                    Ok(eight) if prefix.len() <= 8 => hash_of_two(prefix, u64::from_le_bytes(eight)),
                    _ => xxh3_64(&[prefix, value].concat()),
                };
                FIRST_VALUE + remainder(hash, *buckets, *inverse)
            }
        }
    }

    /// Rows of the column's embedding table: ids are below it.
    pub fn table_rows(&self) -> u32 {
        match self {
            ColumnEncoder::Vocabulary(values, _) => values.len() as u32 + FIRST_VALUE,
            ColumnEncoder::Hash { buckets, .. } => buckets + FIRST_VALUE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn hashed(name: &str, buckets: u32) -> ColumnEncoder {
        let column = CategoricalColumn::single(name, Encoding::Hash { buckets });
        ColumnEncoder::new(&column, Interner::default()).unwrap()
    }

    #[test]
    fn order_is_by_count_then_bytes() {
        let mut c = Counter::default();
        for v in ["b", "z", "a", "z", "rare", "é", "b", "a"] {
            assert!(c.count(v.as_bytes()));
        }
        let v = c.clone().finish(2, None);
        assert_eq!((0..v.len()).map(|i| v.value(i)).collect::<Vec<_>>(), [b"a", b"b", b"z"]);
        let e = ColumnEncoder::Vocabulary(v, Form::Text);
        let ids = ["a", "b", "z", "rare", "new", ""].map(|v| e.id(v.as_bytes()));
        assert_eq!((ids, e.table_rows()), ([2, 3, 4, OOV, OOV, MISSING], 5));
        let coverage = |unseen, expected| Coverage { values: 8, unseen, expected };
        assert_eq!((c.coverage(2, None), c.coverage(1, Some(2))), (coverage(2, 8), coverage(4, 4)));
        assert_eq!((c.coverage(1, None), c.coverage(1, Some(0))), (coverage(0, 2), coverage(8, 8)));
        assert_eq!(c.finish(1, Some(2)).len(), 2);
    }

    #[test]
    fn hash_is_the_pinned_one() {
        let e = hashed("C7", 1000);
        let want = 2 + (xxh3_64(b"C7\0fbad5c96") % 1000) as u32;
        assert_eq!(e.id(b"fbad5c96"), want);
        assert_ne!(hashed("C8", 1_000_000_000).id(b"x"), hashed("C7", 1_000_000_000).id(b"x"));
        // xxh3_64 of the empty string, from the specification: the hash itself is the standard one.
        assert_eq!(xxh3_64(b""), 0x2d06_8005_38d3_94c2);
        assert_eq!((e.id(b""), e.table_rows()), (MISSING, 1002));
    }

    #[test]
    fn long_and_short_values_hash_alike() {
        for length in [1, 60, 61, 62, 200] {
            let value = vec![b'v'; length];
            let want = 2 + (xxh3_64(&[b"C1\0", &value[..]].concat()) % 97) as u32;
            assert_eq!(hashed("C1", 97).id(&value), want);
        }
    }

    proptest! {
        #[test]
        fn remainders_are_exact(n in any::<u64>(), d in 1u32.., small in 1u32..9) {
            for d in [d, small, u32::MAX] {
                let inverse = u64::MAX / u64::from(d);
                for n in [n, n - n % u64::from(d), (n - n % u64::from(d)).wrapping_sub(1), u64::MAX] {
                    prop_assert_eq!(u64::from(remainder(n, d, inverse)), n % u64::from(d));
                }
            }
        }

        #[test]
        fn two_parts_hash_as_one(prefix in prop::collection::vec(any::<u8>(), 1..9), value in any::<[u8; 8]>()) {
            let whole = [&prefix[..], &value].concat();
            prop_assert_eq!(hash_of_two(&prefix, u64::from_le_bytes(value)), xxh3_64(&whole));
        }

        #[test]
        fn interner_agrees_with_a_map(values in prop::collection::vec("[a-c\\x00]{0,11}", 0..400)) {
            let (mut set, mut map) = (Interner::default(), HashMap::new());
            for v in &values {
                let next = map.len() as u32;
                let want = *map.entry(v.clone()).or_insert(next);
                prop_assert_eq!(set.intern(v.as_bytes()), Some(want));
            }
            prop_assert_eq!(set.len(), map.len());
            for (v, n) in &map {
                prop_assert_eq!(set.get(v.as_bytes()), Some(*n));
                prop_assert_eq!(set.value(*n as usize), v.as_bytes());
            }
            prop_assert_eq!(set.get(b"absent"), None);
        }

        #[test]
        fn every_id_is_below_the_table_size(value in "\\PC{0,80}", buckets in 1u32..50) {
            let e = hashed("C1", buckets);
            prop_assert!(e.id(value.as_bytes()) < e.table_rows());
        }
    }
}
