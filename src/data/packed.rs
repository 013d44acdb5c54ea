//! Encoded rows, bit-packed: ids in as many bits as their table needs, 0/1 features in one.
//!
//! A block is self-contained: lengths, then column after column, then a checksum of all of it.

use xxhash_rust::xxh3::xxh3_64;

use super::rows::{ListIds, Rows};

/// Rows of a block.
pub const BLOCK_ROWS: usize = 1 << 14;

/// Writes numbers of few bits.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    held: u64,
    count: u32,
}

impl Bits {
    fn put(&mut self, value: u32, bits: u32) {
        self.held |= u64::from(value) << self.count;
        self.count += bits;
        while self.count >= 8 {
            self.bytes.push(self.held as u8);
            self.held >>= 8;
            self.count -= 8;
        }
    }

    /// Ends a column at a whole byte.
    fn align(&mut self) {
        if self.count > 0 {
            self.bytes.push(self.held as u8);
        }
        (self.held, self.count) = (0, 0);
    }

    /// Numbers, in as many bits as the largest needs.
    fn column(&mut self, values: impl Iterator<Item = u32> + Clone) {
        let bits = 32 - values.clone().max().unwrap_or(0).leading_zeros();
        self.bytes.push(bits as u8);
        values.for_each(|v| self.put(v, bits));
        self.align();
    }
}

/// Reads them back.
struct Reader<'a> {
    bytes: &'a [u8],
    held: u64,
    count: u32,
}

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(first)
    }

    fn word<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.bytes.split_first_chunk::<N>()?;
        self.bytes = rest;
        Some(*first)
    }

    fn get(&mut self, bits: u32) -> Option<u32> {
        while self.count < bits {
            self.held |= u64::from(self.byte()?) << self.count;
            self.count += 8;
        }
        let value = (self.held & ((1u64 << bits) - 1)) as u32;
        self.held >>= bits;
        self.count -= bits;
        Some(value)
    }

    /// Puts `n` numbers into every `stride`-th place from `first` on.
    fn column(&mut self, out: &mut [u32], first: usize, stride: usize) -> Option<()> {
        let bits = u32::from(self.byte()?);
        if bits > 32 {
            return None;
        }
        for place in out.iter_mut().skip(first).step_by(stride) {
            *place = self.get(bits)?;
        }
        (self.held, self.count) = (0, 0);
        Some(())
    }
}

/// How a numeric column is stored.
const FLOATS: u8 = 0;
const ZERO_ONE: u8 = 1;
const INDEXED: u8 = 2;

/// Distinct values up to which a numeric column of a block is stored as a table of them and indices.
const MOST_DISTINCT: usize = 1 << 10;

/// The rows as bytes.
pub fn pack(rows: &Rows) -> Vec<u8> {
    let n = rows.len();
    let mut out = Bits::default();
    let flags = u8::from(!rows.weights.is_empty()) | u8::from(!rows.groups.is_empty()) << 1;
    out.bytes.extend((n as u32).to_le_bytes());
    out.bytes.push(flags);
    for f in 0..rows.features {
        let column = || rows.numeric.iter().skip(f).step_by(rows.features).map(|v| v.to_bits());
        if column().all(|v| v == 0 || v == 1.0f32.to_bits()) {
            out.bytes.push(ZERO_ONE);
            column().for_each(|v| out.put(u32::from(v != 0), 1));
            out.align();
            continue;
        }
        let mut distinct: Vec<u32> = column().collect();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() <= MOST_DISTINCT {
            out.bytes.push(INDEXED);
            out.bytes.extend((distinct.len() as u32).to_le_bytes());
            distinct.iter().for_each(|v| out.bytes.extend(v.to_le_bytes()));
            let index = |v: u32| distinct.binary_search(&v).unwrap_or(0) as u32;
            out.column(column().map(index));
        } else {
            out.bytes.push(FLOATS);
            column().for_each(|v| out.bytes.extend(v.to_le_bytes()));
        }
    }
    for c in 0..rows.columns {
        out.column(rows.ids.iter().skip(c).step_by(rows.columns).copied());
    }
    for list in &rows.lists {
        out.column((0..n).map(|i| list.row(i).len() as u32));
        out.bytes.extend((list.ids.len() as u32).to_le_bytes());
        out.column(list.ids.iter().copied());
    }
    out.column(rows.labels.iter().map(|&l| u32::from(l)));
    rows.weights.iter().for_each(|w| out.bytes.extend(w.to_le_bytes()));
    rows.groups.iter().for_each(|g| out.bytes.extend(g.to_le_bytes()));
    let sum = xxh3_64(&out.bytes);
    out.bytes.extend(sum.to_le_bytes());
    out.bytes
}

/// Appends the rows of [`pack`] to rows of the same width; `None` if the bytes are not those that were written.
pub fn unpack(bytes: &[u8], rows: &mut Rows) -> Option<()> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if xxh3_64(body).to_le_bytes() != *sum {
        return None;
    }
    let mut r = Reader { bytes: body, held: 0, count: 0 };
    let n = u32::from_le_bytes(r.word()?) as usize;
    let flags = r.byte()?;
    let mut block =
        Rows { lists: vec![ListIds::default(); rows.lists.len()], ..Rows::new(rows.features, rows.columns) };
    let mut values = vec![0u32; n];
    block.numeric.resize(n * rows.features, 0.0);
    for f in 0..rows.features {
        match r.byte()? {
            ZERO_ONE => {
                for place in block.numeric.iter_mut().skip(f).step_by(rows.features) {
                    *place = r.get(1)? as f32;
                }
                (r.held, r.count) = (0, 0);
            }
            INDEXED => {
                let k = u32::from_le_bytes(r.word()?) as usize;
                let table: Vec<f32> =
                    (0..k).map(|_| Some(f32::from_le_bytes(r.word()?))).collect::<Option<_>>()?;
                r.column(&mut values, 0, 1)?;
                for (place, &v) in block.numeric.iter_mut().skip(f).step_by(rows.features).zip(&values) {
                    *place = *table.get(v as usize)?;
                }
            }
            FLOATS => {
                for place in block.numeric.iter_mut().skip(f).step_by(rows.features) {
                    *place = f32::from_le_bytes(r.word()?);
                }
            }
            _ => return None,
        }
    }
    block.ids.resize(n * rows.columns, 0);
    for c in 0..rows.columns {
        r.column(&mut block.ids, c, rows.columns)?;
    }
    for list in &mut block.lists {
        r.column(&mut values, 0, 1)?;
        let mut end = 0u32;
        list.ends.extend(values.iter().map(|&len| {
            end += len;
            end
        }));
        let count = u32::from_le_bytes(r.word()?);
        if count != end {
            return None;
        }
        list.ids.resize(count as usize, 0);
        r.column(&mut list.ids, 0, 1)?;
    }
    r.column(&mut values, 0, 1)?;
    block.labels.extend(values.iter().map(|&v| v as u8));
    if flags & 1 != 0 {
        block.weights = (0..n).map(|_| Some(f32::from_le_bytes(r.word()?))).collect::<Option<_>>()?;
    }
    if flags & 2 != 0 {
        block.groups = (0..n).map(|_| Some(u64::from_le_bytes(r.word()?))).collect::<Option<_>>()?;
    }
    rows.append(&block);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_packed_comes_back(
            n in 0usize..40,
            features in 0usize..4,
            columns in 0usize..4,
            lists in 0usize..3,
            salt in any::<u32>(),
            extra in any::<[bool; 2]>(),
            flip in any::<prop::sample::Index>(),
        ) {
            let mix = |i: usize, k: usize| (i as u32 + 1).wrapping_mul(2_654_435_761 ^ salt).rotate_left(k as u32 * 7);
            let mut rows = Rows::new(features, columns);
            rows.lists = vec![ListIds::default(); lists];
            for i in 0..n {
                // 0/1, few values, any bits but those of NaN
                rows.numeric.extend((0..features).map(|k| match k {
                    0 => (mix(i, k) & 1) as f32,
                    1 => (mix(i, k) % 5) as f32 / 3.0,
                    _ => mix(i, k) as f32 * 1e-3,
                }));
                rows.ids.extend((0..columns).map(|k| mix(i, k) >> (11 * k)));
                for (k, l) in rows.lists.iter_mut().enumerate() {
                    l.ids.extend((0..mix(i, k) % 4).map(|j| mix(i, j as usize) % 1000));
                    l.ends.push(l.ids.len() as u32);
                }
                rows.labels.push((mix(i, 3) % 3) as u8);
                if extra[0] { rows.weights.push(mix(i, 4) as f32); }
                if extra[1] { rows.groups.push(u64::from(mix(i, 5)) << 20); }
            }
            let bytes = pack(&rows);
            let empty = Rows { lists: vec![ListIds::default(); lists], ..Rows::new(features, columns) };
            let mut back = empty.clone();
            prop_assert!(unpack(&bytes, &mut back).is_some());
            prop_assert_eq!(&back, &rows);
            // twice: offsets of lists go on
            prop_assert!(unpack(&bytes, &mut back).is_some());
            prop_assert_eq!(back.len(), 2 * n);
            let mut damaged = bytes.clone();
            let at = flip.index(damaged.len());
            damaged[at] ^= 4;
            prop_assert!(unpack(&damaged, &mut empty.clone()).is_none());
            prop_assert!(unpack(&bytes[..at], &mut empty.clone()).is_none());
        }
    }

    #[test]
    fn packing_is_smaller() {
        let mut rows = Rows::new(26, 26);
        for i in 0..BLOCK_ROWS {
            rows.numeric
                .extend((0..26).map(|k| if k < 13 { ((i * k) % 300) as f32 } else { (i % 2) as f32 }));
            rows.ids.extend((0..26).map(|k| (i * (k + 1) % 5000) as u32));
            rows.labels.push(0);
        }
        let (packed, plain) = (pack(&rows).len(), rows.bytes());
        assert!(packed * 3 < plain, "{packed} of {plain}");
    }
}
