//! One file, three parts: training, validation, test.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A part of a split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Rows to learn from.
    Train,
    /// Rows that choose the best weights.
    Valid,
    /// Rows that nothing is chosen on.
    Test,
}

/// What decides a row's part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "lowercase")]
pub enum SplitBy {
    /// Chance: a hash of the row's place in the files.
    Random {
        /// Another seed, another split.
        seed: u64,
    },
    /// A hash of a column's value, so that equal values stay together.
    Group {
        /// The column.
        column: String,
        /// Another seed, another split.
        seed: u64,
    },
    /// Order by a column: the earliest rows train, the latest test.
    Time {
        /// The column.
        column: String,
        /// Last time of the training rows, last time of the validation rows.
        cuts: [f64; 2],
    },
}

/// How rows are split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Split {
    /// Shares of training, validation and test rows; their sum is 1.
    pub shares: [f64; 3],
    /// What decides.
    #[serde(flatten)]
    pub by: SplitBy,
}

impl Split {
    /// The column that decides, if one does.
    pub fn column(&self) -> Option<&str> {
        match &self.by {
            SplitBy::Random { .. } => None,
            SplitBy::Group { column, .. } | SplitBy::Time { column, .. } => Some(column),
        }
    }

    /// The part of row `row` (line, from 1) of file `file`, whose deciding column holds `key`; `None` where the
    /// key is no time.
    pub fn part(&self, file: usize, row: u64, key: &[u8]) -> Option<Part> {
        let hashed = |bytes: &[u8], seed: u64| {
            // 53 bits, uniform in [0, 1)
            let u = (xxh3_64_with_seed(bytes, seed) >> 11) as f64 / (1u64 << 53) as f64;
            if u < self.shares[0] {
                Part::Train
            } else if u < self.shares[0] + self.shares[1] {
                Part::Valid
            } else {
                // a sum just below 1 gives the test part nothing that it should not have
                if self.shares[2] > 0.0 { Part::Test } else { Part::Valid }
            }
        };
        Some(match &self.by {
            SplitBy::Random { seed } => {
                let mut place = [0; 16];
                place[..8].copy_from_slice(&(file as u64).to_le_bytes());
                place[8..].copy_from_slice(&row.to_le_bytes());
                hashed(&place, *seed)
            }
            SplitBy::Group { seed, .. } => hashed(key, *seed),
            SplitBy::Time { cuts, .. } => {
                let time = time_of(key)?;
                if time <= cuts[0] {
                    Part::Train
                } else if time <= cuts[1] {
                    Part::Valid
                } else {
                    Part::Test
                }
            }
        })
    }
}

/// Reads `0.8,0.1,0.1` or `0.9,0.1`.
pub fn parse_shares(text: &str) -> Result<[f64; 3], String> {
    let help = "expected shares of training, validation and test rows that add up to 1, such as 0.8,0.1,0.1";
    let parts: Result<Vec<f64>, _> = text.split(',').map(|p| p.trim().parse::<f64>()).collect();
    let parts = parts.map_err(|_| format!("{text:?} are no shares; {help}"))?;
    let mut shares = [0.0; 3];
    if !(2..=3).contains(&parts.len()) {
        return Err(format!("{} shares; {help}", parts.len()));
    }
    shares[..parts.len()].copy_from_slice(&parts);
    let sum: f64 = shares.iter().sum();
    if (sum - 1.0).abs() > 1e-6 || shares.iter().any(|s| *s < 0.0) {
        return Err(format!("the shares {text} add up to {sum}; {help}"));
    }
    if shares[0] == 0.0 || shares[1] == 0.0 {
        return Err(format!("{text} leaves no training or no validation rows; {help}"));
    }
    Ok(shares)
}

/// A time as a number that orders like it: a number itself, or the digits of a date from year to second.
pub fn time_of(text: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(text).ok()?.trim();
    if let Ok(number) = text.parse::<f64>() {
        return number.is_finite().then_some(number);
    }
    // 2024-05-31, 2024-05-31 12:00:00.5, 2024-05-31T12:00:00Z: fixed widths from the year on
    let mut groups = text.split(|c: char| !c.is_ascii_digit());
    let year = groups.next().filter(|g| g.len() == 4)?;
    let mut value: f64 = year.parse().ok()?;
    for _ in 0..5 {
        let group = groups.next().unwrap_or("");
        if group.len() > 2 {
            return None;
        }
        value = 100.0 * value + group.parse::<f64>().unwrap_or(0.0);
    }
    Some(value)
}

/// The cuts that give the earliest `shares[0]` of the times to training, the next `shares[1]` to validation;
/// equal times stay together. `None` where one of the parts that has a share would be empty.
pub fn cuts(mut times: Vec<f64>, shares: [f64; 3]) -> Option<[f64; 2]> {
    times.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| {
        let n = (share * times.len() as f64).round() as usize;
        times.get(n.clamp(1, times.len().max(1)) - 1).copied()
    };
    let cuts = [at(shares[0])?, if shares[2] > 0.0 { at(shares[0] + shares[1])? } else { f64::MAX }];
    let last = *times.last()?;
    let valid = times.iter().any(|&t| t > cuts[0] && t <= cuts[1]);
    (valid && (shares[2] == 0.0 || last > cuts[1])).then_some(cuts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chance_splits_by_share_and_groups_stay_together() {
        let shares = parse_shares("0.8,0.1,0.1").unwrap();
        let random = Split { shares, by: SplitBy::Random { seed: 1 } };
        let group = Split { shares, by: SplitBy::Group { column: "user".into(), seed: 1 } };
        let mut counts = [0; 3];
        for row in 1..=10_000 {
            counts[random.part(0, row, b"").unwrap() as usize] += 1;
            assert_eq!(group.part(0, row, b"u7"), group.part(3, 1, b"u7"));
        }
        assert!(
            (counts[0] as f64 - 8000.0).abs() < 200.0 && (counts[2] as f64 - 1000.0).abs() < 150.0,
            "{counts:?}"
        );
        let no_test = Split { shares: parse_shares("0.9,0.1").unwrap(), by: SplitBy::Random { seed: 2 } };
        assert!((1..5000).all(|row| no_test.part(0, row, b"") != Some(Part::Test)));
        for bad in ["0.8", "0.8,0.1", "a,b", "1,0", "0.5,0.6,-0.1", "0,0.5,0.5"] {
            assert!(parse_shares(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn time_orders_numbers_and_dates() {
        assert!(time_of(b"881250949") < time_of(b"881250950"));
        assert!(time_of(b"2024-05-31") < time_of(b"2024-05-31 00:00:01"));
        assert!(time_of(b"2024-05-31T23:59:59Z") < time_of(b"2024-06-01"));
        assert_eq!((time_of(b"yesterday"), time_of(b""), time_of(b"nan")), (None, None, None));
        let times: Vec<f64> = (0..100).rev().map(f64::from).collect();
        let c = cuts(times, [0.8, 0.1, 0.1]).unwrap();
        assert_eq!(c, [79.0, 89.0]);
        let s = Split { shares: [0.8, 0.1, 0.1], by: SplitBy::Time { column: "t".into(), cuts: c } };
        let part = |t: &str| s.part(0, 1, t.as_bytes());
        assert_eq!(
            (part("79"), part("80"), part("90")),
            (Some(Part::Train), Some(Part::Valid), Some(Part::Test))
        );
        assert_eq!(part("?"), None);
        assert_eq!(cuts(vec![5.0; 10], [0.8, 0.2, 0.0]), None, "one time cannot be split");
    }
}
