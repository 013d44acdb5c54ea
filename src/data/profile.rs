//! What the training rows looked like, column by column: kept with the vocabularies, so that other rows can be compared.

use serde::{Deserialize, Serialize};

use super::columns::{log_of, log_of_small};
use super::schema::Transform;

/// The columns of the training rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// One for each numeric column of the schema.
    pub numeric: Vec<NumericProfile>,
    /// One for each categorical column.
    pub categorical: Vec<CategoricalProfile>,
}

/// A numeric column of the training rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumericProfile {
    /// Rows without a number.
    pub missing: u64,
    /// Where the numbers of the others lie; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<Range>,
}

/// Where numbers lie. The quantiles are those of every 2ᵏ-th number, 4096 of them at most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    /// The smallest.
    pub min: f64,
    /// 1 % are below it.
    pub low: f64,
    /// 1 % are above it.
    pub high: f64,
    /// The largest.
    pub max: f64,
}

/// A categorical column of the training rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CategoricalProfile {
    /// Rows without a value.
    pub missing: u64,
    /// What its vocabulary covers, that of its table's owner where it shares one; absent where values are hashed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<Coverage>,
}

/// How many of the training rows' values a vocabulary has. A list's values count one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coverage {
    /// Values, repeated ones counted again.
    pub values: u64,
    /// Those without an id of their own: too seldom, or beyond `max_size`.
    pub unseen: u64,
    /// Those that had none if their own row were not a training row: as many are to be expected in further rows.
    pub expected: u64,
}

/// Mean and squared deviations in one stable pass (Welford): exact for a constant column.
#[derive(Clone, Debug, Default)]
struct Moments {
    count: u64,
    mean: f64,
    squares: f64,
}

impl Moments {
    fn push(&mut self, value: f64) {
        self.count += 1;
        let delta = value - self.mean;
        self.mean += delta / self.count as f64;
        self.squares += delta * (value - self.mean);
    }

    /// The same of many at once: without a division for each, and exact for a constant column, too.
    fn push_all(&mut self, values: &[f64]) {
        let Some(&first) = values.first() else { return };
        let n = values.len() as f64;
        let mean = first + sum(values, |v| v - first) / n;
        let squares = sum(values, |v| (v - mean) * (v - mean));
        let (before, delta) = (self.count as f64, mean - self.mean);
        self.count += values.len() as u64;
        let all = self.count as f64;
        self.mean += delta * (n / all);
        self.squares += squares + delta * delta * (before * (n / all));
    }

    /// Population standard deviation, 0 without values.
    fn std(&self) -> f64 {
        (self.squares / self.count.max(1) as f64).sqrt()
    }
}

/// A sum in four lanes, which need not wait for one another.
fn sum(values: &[f64], of: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0; 4];
    for four in values.chunks(4) {
        lanes.iter_mut().zip(four).for_each(|(lane, v)| *lane += of(*v));
    }
    lanes[0] + lanes[1] + (lanes[2] + lanes[3])
}

/// Every 2ᵏ-th of some numbers, k growing with their number: the same ones, however they come.
#[derive(Clone, Debug, Default)]
struct Sample {
    kept: Vec<f64>,
    count: u64,
    /// k.
    thinned: u32,
}

impl Sample {
    const MOST: usize = 4096;

    fn push(&mut self, values: &[f64]) {
        let mut at = self.count.next_multiple_of(1 << self.thinned);
        let end = self.count + values.len() as u64;
        while at < end {
            if self.kept.len() == Self::MOST {
                let mut place = 0;
                self.kept.retain(|_| {
                    place += 1;
                    place % 2 == 1
                });
                self.thinned += 1;
                at = at.next_multiple_of(1 << self.thinned);
                continue;
            }
            self.kept.push(values[(at - self.count) as usize]);
            at += 1 << self.thinned;
        }
        self.count = end;
    }

    /// The numbers that 1 % lie below and 1 % above.
    fn quantiles(mut self) -> Option<(f64, f64)> {
        let last = self.kept.len().checked_sub(1)?;
        self.kept.sort_unstable_by(f64::total_cmp);
        let tail = last / 100;
        Some((self.kept[tail], self.kept[last - tail]))
    }
}

/// Numbers that are counted at once.
const AT_ONCE: usize = 256;

/// Collects what is fitted to a numeric column.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    moments: Moments,
    missing: u64,
    bounds: (f64, f64),
    sample: Sample,
    /// Present ones that are still to be counted, the first `len`: always as many at once, so that rounding does not hang
    /// on how they came.
    waiting: Vec<f64>,
    len: usize,
}

impl Default for Numbers {
    fn default() -> Numbers {
        Numbers {
            moments: Moments::default(),
            missing: 0,
            bounds: (f64::INFINITY, f64::NEG_INFINITY),
            sample: Sample::default(),
            waiting: vec![0.0; AT_ONCE],
            len: 0,
        }
    }
}

impl Numbers {
    /// Counts rows; NaN is missing.
    pub fn push(&mut self, transform: &Transform, values: impl Iterator<Item = f64>) {
        for value in values {
            // without a branch: which ones are missing is not to be guessed
            let missing = value.is_nan();
            self.waiting[self.len] = value;
            self.len += usize::from(!missing);
            self.missing += u64::from(missing);
            if self.len == AT_ONCE {
                self.count(transform);
            }
        }
    }

    fn count(&mut self, transform: &Transform) {
        let values = &mut self.waiting[..std::mem::take(&mut self.len)];
        let (mut min, mut max) = self.bounds;
        for &v in values.iter() {
            min = if v < min { v } else { min };
            max = if v > max { v } else { max };
        }
        self.bounds = (min, max);
        self.sample.push(values);
        match transform {
            Transform::Standardize { .. } => values.iter().for_each(|&v| self.moments.push(v)),
            Transform::LogStandardize { .. } => {
                let small = log_of_small();
                values.iter_mut().for_each(|v| *v = log_of(*v, small));
                self.moments.push_all(values);
            }
            Transform::Log | Transform::None => {}
        }
    }

    /// Puts what was fitted into the transform.
    pub fn finish(mut self, transform: &mut Transform) -> NumericProfile {
        self.count(transform);
        if let Transform::Standardize { mean, std } | Transform::LogStandardize { mean, std } = transform {
            (*mean, *std) = (self.moments.mean, self.moments.std());
        }
        let (min, max) = self.bounds;
        let range = self.sample.quantiles().map(|(low, high)| Range { min, low, high, max });
        NumericProfile { missing: self.missing, range }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_of_all_rows_and_quantiles_near() {
        for n in [1u64, 5, 4096, 4097, 100_000] {
            let mut numbers = Numbers::default();
            // each once, in an order that is not theirs
            let values = (0..n).map(|i| (i * 7919 % n) as f64);
            numbers.push(&Transform::None, values.chain([f64::NAN]));
            numbers.count(&Transform::None);
            let kept = numbers.sample.kept.len();
            assert!(kept as u64 == n || (2048..=4096).contains(&kept), "{n}: {kept}");
            let profile = numbers.finish(&mut Transform::None.clone());
            let r = profile.range.unwrap();
            let most = (n - 1) as f64;
            assert_eq!((profile.missing, r.min, r.max), (1, 0.0, most));
            let near = |got: f64, want: f64| (got - want).abs() <= 0.01 * n as f64;
            assert!(near(r.low, 0.01 * most) && near(r.high, 0.99 * most), "{n}: {r:?}");
        }
        assert_eq!(Numbers::default().finish(&mut Transform::None.clone()), NumericProfile::default());
    }

    #[test]
    fn logarithms_have_their_own_moments() {
        let mut transform = Transform::LOG_STANDARDIZE;
        let mut numbers = Numbers::default();
        let values = [0.0, 1e9, -5.0, f64::NAN, 1e9];
        numbers.push(&transform, values.into_iter());
        numbers.finish(&mut transform);
        let Transform::LogStandardize { mean, std } = transform else { panic!("{transform:?}") };
        let half = 1e9_f64.ln_1p() / 2.0;
        assert!((mean - half).abs() < 1e-12 && (std - half).abs() < 1e-12, "{mean} {std}");
        assert!((transform.apply(0.0) + 1.0).abs() < 1e-6 && (transform.apply(1e9) - 1.0).abs() < 1e-6);
        // however they come, to the last bit
        let many: Vec<f64> = (0..10_000).map(|i| f64::from(i * 7919 % 10_000) * 1e5).collect();
        let fit = |size: usize| {
            let (mut numbers, mut transform) = (Numbers::default(), Transform::LOG_STANDARDIZE);
            many.chunks(size).for_each(|some| numbers.push(&transform, some.iter().copied()));
            let profile = numbers.finish(&mut transform);
            (transform, profile)
        };
        assert_eq!(fit(10_000), fit(77));
        let Transform::LogStandardize { mean, std } = fit(1).0 else { panic!() };
        let logs: Vec<f64> = many.iter().map(|v| v.ln_1p()).collect();
        let want = logs.iter().sum::<f64>() / 1e4;
        let deviation = (logs.iter().map(|v| (v - want).powi(2)).sum::<f64>() / 1e4).sqrt();
        assert!((mean - want).abs() < 1e-9 && (std - deviation).abs() < 1e-9, "{mean} {std}");
        // a constant column gives zeros
        let mut constant = Numbers::default();
        constant.push(&transform, std::iter::repeat_n(17.5, 1000));
        constant.finish(&mut transform);
        assert_eq!(transform.apply(17.5), 0.0);
    }
}
