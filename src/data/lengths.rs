//! How long the lists of a column are in the training rows: what tells how many ids a batch holds at most.

use serde::{Deserialize, Serialize};

/// Lengths up to here are counted each by itself.
const EXACT: u32 = 16;

/// A histogram of list lengths: exact where they are short, then in steps of an eighth at most, each length counted as
/// the longest of its step. What is read from it is never less than what the rows have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Lengths {
    /// (upper edge, rows), rising.
    steps: Vec<(u32, u64)>,
}

/// The longest length that is counted together with `length`.
fn edge(length: u32) -> u32 {
    if length <= EXACT {
        return length;
    }
    // four leading bits stay: 8 to 15 steps of `width` each
    let width = 1u64 << (28 - (length - 1).leading_zeros());
    u64::from(length).next_multiple_of(width).min(u64::from(u32::MAX)) as u32
}

impl Lengths {
    /// Counts a row's list.
    pub fn push(&mut self, length: u32) {
        self.push_rows(length, 1);
    }

    /// Counts the lists of several rows.
    pub fn push_rows(&mut self, length: u32, rows: u64) {
        let edge = edge(length);
        match self.steps.binary_search_by_key(&edge, |s| s.0) {
            Ok(at) => self.steps[at].1 += rows,
            Err(at) => self.steps.insert(at, (edge, rows)),
        }
    }

    /// Counts the lists of other rows as well.
    pub fn merge(&mut self, other: &Lengths) {
        other.steps.iter().for_each(|&(length, rows)| self.push_rows(length, rows));
    }

    /// Rows that were counted.
    pub fn rows(&self) -> u64 {
        self.steps.iter().map(|s| s.1).sum()
    }

    /// What is to be said where some lists are far longer than nearly all: about how long they are, and a `max_length`
    /// that cuts no others.
    pub fn outliers(&self) -> Option<String> {
        let all = self.rows() as f64;
        let mut before = 0;
        let usual = self.steps.iter().find(|s| {
            before += s.1;
            before as f64 >= 0.99 * all
        });
        let (longest, usual) = (self.steps.last()?.0, usual?.0.max(1));
        (longest > 100 && longest / 16 > usual).then(|| {
            format!(
                "the longest cell has about {longest} values, 99 of 100 rows have at most {usual}: max_length = {} cuts what is \
                 longer",
                (2 * usual).next_power_of_two()
            )
        })
    }

    /// At least the ids of any `rows` of the training rows, of each `most` at most: the sum of the longest. Of more rows
    /// than there were, as if each had been there so often.
    pub fn longest(&self, rows: usize, most: u32) -> usize {
        let count: u64 = self.steps.iter().map(|s| s.1).sum();
        if count == 0 {
            return rows.saturating_mul(most as usize);
        }
        let times = (rows as u64).div_ceil(count).max(1);
        let (mut left, mut sum) = (rows as u64, 0u64);
        for (edge, n) in self.steps.iter().rev() {
            let taken = n.saturating_mul(times).min(left);
            sum = sum.saturating_add(taken.saturating_mul(u64::from((*edge).min(most))));
            left -= taken;
        }
        usize::try_from(sum).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_choice_of_rows_has_more_and_the_bound_is_near(
            lengths in prop::collection::vec(prop_oneof![0u32..20, 0u32..3000, 0u32..1_000_000], 1..60),
            rows in 1usize..80,
            most in prop_oneof![1u32..30, 1u32..1_000_000],
        ) {
            let mut histogram = Lengths::default();
            lengths.iter().for_each(|&l| histogram.push(l));
            let mut cut: Vec<usize> = lengths.iter().map(|&l| l.min(most) as usize).collect();
            cut.sort_unstable_by_key(|l| std::cmp::Reverse(*l));
            let sum: usize = cut.iter().take(rows).sum();
            let bound = histogram.longest(rows, most);
            prop_assert!(bound >= sum, "{bound} < {sum}");
            if rows <= lengths.len() {
                prop_assert!(bound <= sum + sum / 8 + rows, "{bound} of {sum}");
            }
            let text = serde_json::to_string(&histogram).unwrap();
            prop_assert_eq!(serde_json::from_str::<Lengths>(&text).unwrap(), histogram);
        }
    }

    #[test]
    fn steps_are_exact_then_relative() {
        assert_eq!([0, 1, 15, 16, 17, 18, 19, 32, 33].map(edge), [0, 1, 15, 16, 18, 18, 20, 32, 36]);
        assert_eq!((edge(20_000), edge(u32::MAX)), (20_480, u32::MAX));
        let mut one = Lengths::default();
        (0..1000).for_each(|_| one.push(3));
        one.push(20_000);
        assert_eq!(one.longest(512, 20_000), 20_000 + 511 * 3);
        assert_eq!(Lengths::default().longest(4, 7), 28, "without rows nothing is known");
        let said = one.outliers().unwrap();
        assert!(said.contains("20480 values") && said.contains("at most 3: max_length = 8"), "{said}");
        let mut even = Lengths::default();
        (0..1000).for_each(|i| even.push(i));
        assert_eq!((even.outliers(), Lengths::default().outliers()), (None, None));
    }
}
