//! Rows of text whose fields are read column by column: what a column needs is then at hand for all of them, and
//! nothing hangs on a guess of the next field's length.

use super::number::parse_number;

/// Rows of a [`Batch`] at most: their text stays in a core's nearest cache.
pub(crate) const BATCH: usize = 64;

/// Rows of one block, each a run of marks.
pub(crate) struct Batch<'a> {
    text: &'a [u8],
    len: usize,
    rows: [Row<'a>; BATCH],
}

#[derive(Clone, Copy, Default)]
struct Row<'a> {
    /// Places of what bounds its fields, one more than these ([`super::marks::Marks`]).
    marks: &'a [u32],
    /// Its end in the text, in front of a carriage return.
    end: u32,
    line: u64,
}

impl Row<'_> {
    #[inline(always)]
    fn range(&self, field: usize) -> (u32, u32) {
        let end = self.marks[field + 1].min(self.end);
        (self.marks[field].wrapping_add(1), end)
    }
}

impl<'a> Batch<'a> {
    /// No rows yet.
    pub fn new(text: &'a [u8]) -> Batch<'a> {
        Batch { text, len: 0, rows: [Row::default(); BATCH] }
    }

    /// The block's text.
    pub fn text(&self) -> &'a [u8] {
        self.text
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether there is room for no more.
    pub fn full(&self) -> bool {
        self.len == BATCH
    }

    /// Forgets the rows.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Adds the row between some marks.
    #[inline(always)]
    pub fn add(&mut self, marks: &'a [u32], end: u32, line: u64) {
        self.rows[self.len] = Row { marks, end, line };
        self.len += 1;
    }

    /// The line of a row.
    pub fn line(&self, row: usize) -> u64 {
        self.rows[row].line
    }

    /// Where a field of a row lies in the text.
    #[inline(always)]
    pub fn range(&self, row: usize, field: usize) -> (u32, u32) {
        self.rows[row].range(field)
    }

    /// The bytes of a field of a row.
    #[inline(always)]
    pub fn field(&self, row: usize, field: usize) -> &'a [u8] {
        let (start, end) = self.range(row, field);
        &self.text[start as usize..end as usize]
    }

    /// Where a field of each row lies.
    #[inline(always)]
    pub fn ranges(&self, field: usize) -> [(u32, u32); BATCH] {
        let mut ranges = [(0, 0); BATCH];
        for (row, range) in self.rows[..self.len].iter().zip(&mut ranges) {
            *range = row.range(field);
        }
        ranges
    }

    /// The numbers of a field of each row, as [`parse_number`] reads them, NaN where it is missing; `false` if one of
    /// them is none. `missing` knows the words for a missing value.
    #[inline(always)]
    pub fn numbers(&self, field: usize, values: &mut [f64; BATCH], missing: impl Fn(&[u8]) -> bool) -> bool {
        let (mut words, mut lengths, mut odd) = ([0u64; BATCH], [0u64; BATCH], [0u64; BATCH]);
        for (row, (word, length)) in self.rows[..self.len].iter().zip(words.iter_mut().zip(&mut lengths)) {
            let (start, end) = row.range(field);
            *word = word_before(self.text, end as usize);
            *length = u64::from(end.wrapping_sub(start));
        }
        let mut any = 0;
        for row in 0..BATCH {
            (values[row], odd[row]) = up_to_eight(words[row], lengths[row]);
            any |= odd[row];
        }
        if any != 0 {
            for row in (0..self.len).filter(|&row| odd[row] != 0) {
                let field = self.field(row, field);
                values[row] = match parse_number(field) {
                    Some(value) => value,
                    None if missing(field) => f64::NAN,
                    None => return false,
                };
            }
        }
        true
    }
}

/// The eight bytes that end at `end`, the last one highest; zeros for those before the text.
#[inline(always)]
pub(crate) fn word_before(text: &[u8], end: usize) -> u64 {
    let before = &text[..end];
    match before.last_chunk() {
        Some(eight) => u64::from_le_bytes(*eight),
        None => {
            let mut eight = [0; 8];
            eight[8 - end..].copy_from_slice(before);
            u64::from_le_bytes(eight)
        }
    }
}

/// The whole number written in the last `length` bytes of a word, NaN if that is 0; then 0, or 1 where there stands
/// something else. Without a branch, so that several can be read at once.
#[inline(always)]
fn up_to_eight(word: u64, length: u64) -> (f64, u64) {
    const ZEROS: u64 = 0x3030_3030_3030_3030;
    let bits = 8 * length.min(8);
    let field = word.unbounded_shr(64 - bits as u32);
    let negative = u64::from(field & 0xff == u64::from(b'-'));
    // the digits' places, which a sign is none of
    let keep = u64::MAX.unbounded_shl((64 - bits + 8 * negative) as u32);
    let v = (word & keep) | (ZEROS & !keep);
    let digits =
        (v & 0xf0f0_f0f0_f0f0_f0f0) | ((v.wrapping_add(0x0606_0606_0606_0606) & 0xf0f0_f0f0_f0f0_f0f0) >> 4);
    let odd = u64::from(digits != 0x3333_3333_3333_3333)
        | u64::from(length > 8)
        | u64::from(length == negative) & negative;
    let v = ((v & 0x0f0f_0f0f_0f0f_0f0f).wrapping_mul(2561) >> 8) & 0x00ff_00ff_00ff_00ff;
    let v = (v.wrapping_mul(6_553_601) >> 16) & 0x0000_ffff_0000_ffff;
    let v = v.wrapping_mul(42_949_672_960_001) >> 32;
    let size = f64::from(v as i32);
    let value = if negative == 1 { -size } else { size };
    (if length == 0 { f64::NAN } else { value }, odd)
}

/// Numbers in [`log_of_small`].
const SMALL: u32 = 1 << 12;

/// ln(1 + v) of the whole numbers from 0: the counts of a click log are small whole numbers, and a logarithm costs
/// more than the rest.
pub(crate) struct SmallLogs {
    /// As f64.
    pub exact: Vec<f64>,
    /// As a feature.
    pub plain: Vec<f32>,
}

/// The table.
pub(crate) fn log_of_small() -> &'static SmallLogs {
    static TABLE: std::sync::OnceLock<SmallLogs> = std::sync::OnceLock::new();
    TABLE.get_or_init(|| {
        let exact: Vec<f64> = (0..SMALL).map(|v| f64::from(v).ln_1p()).collect();
        SmallLogs { plain: exact.iter().map(|&log| log as f32).collect(), exact }
    })
}

/// ln(1 + max(v, 0)) by the table; 0 of what is missing.
#[inline(always)]
pub(crate) fn log_of(value: f64, small: &SmallLogs) -> f64 {
    match small.exact.get(place_of(value) as usize) {
        Some(log) => *log,
        None => value.max(0.0).ln_1p(),
    }
}

/// The place of a number's logarithm in [`log_of_small`], or a place behind it; what is missing counts as 0.
#[inline(always)]
pub(crate) fn place_of(value: f64) -> u32 {
    const WHOLE: f64 = (1u64 << 52) as f64; // from here on numbers have no fraction
    let count = value.max(0.0).min(f64::from(SMALL));
    let shifted = count + WHOLE;
    if shifted - WHOLE == count { shifted.to_bits() as u32 } else { SMALL }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn logarithms_are_looked_up_where_there_are_some() {
        for value in [0.0, -0.0, 1.0, 17.0, 4095.0, 0.5, 4095.5, 4096.0, 1e9, 1e300, -1.0, -2.5, f64::NAN] {
            let known = log_of_small().exact.get(place_of(value) as usize);
            let small = value.is_nan() || value <= 0.0 || (value.fract() == 0.0 && value < f64::from(SMALL));
            assert_eq!(known.is_some(), small, "{value}");
            assert!(known.is_none_or(|&log| log == value.max(0.0).ln_1p()), "{value}");
        }
    }

    proptest! {
        #[test]
        fn numbers_at_once_are_the_same_numbers(
            fields in prop::collection::vec("-?[0-9]{0,10}|[0-9/:;a-]{0,9}|-?[0-9]{1,3}[.][0-9]", 1..=BATCH),
        ) {
            let text = fields.join("\t") + "\n";
            let mut places = vec![u32::MAX];
            places.extend((0..text.len() as u32).filter(|&i| matches!(text.as_bytes()[i as usize], b'\t' | b'\n')));
            let mut batch = Batch::new(text.as_bytes());
            for (row, marks) in places.windows(2).enumerate() {
                batch.add(marks, marks[1], 1 + row as u64);
            }
            let want: Vec<Option<f64>> = fields.iter().map(|f| parse_number(f.as_bytes())).collect();
            let mut values = [0.0; BATCH];
            let good = batch.numbers(0, &mut values, |_| false);
            prop_assert_eq!(good, want.iter().all(Option::is_some));
            prop_assert!(batch.numbers(0, &mut values, |_| true));
            for (value, want) in values.iter().zip(want) {
                prop_assert_eq!(value.to_bits(), want.unwrap_or(f64::NAN).to_bits());
            }
        }
    }
}
