//! NE, log loss, AUC and calibration from logits (math.md, section 6 and the fine print in 8).
//!
//! The public path is `train::metrics`; the code sits on this floor because the synthetic click log
//! reports the same figures of its planted truth, and a room imports only from rooms below it.

use super::batch::Batch;
use serde::{Deserialize, Serialize};

/// Metrics of one evaluated set. `None` (JSON `null`) where the quantity is undefined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Rows with a positive weight.
    pub rows: u64,
    /// Those of them with label 1.
    pub positives: u64,
    /// Cross-entropy over the entropy of the set's own click rate; undefined for one class.
    pub ne: Option<f64>,
    /// Weighted mean cross-entropy in nats; NaN (JSON `null`) for an empty set.
    #[serde(deserialize_with = "crate::diagnose::record::number")]
    pub logloss: f64,
    /// Exact rank statistic of the logits, ties at half; undefined for one class.
    pub auc: Option<f64>,
    /// Σ p̂ / Σ y; undefined when Σ y = 0.
    pub calibration: Option<f64>,
}

/// AUC within groups (a user's impressions, a query's results): the mean over groups, weighted by their rows, of the
/// groups that have both classes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedAuc {
    /// The mean; undefined if no group has both classes.
    pub auc: Option<f64>,
    /// Groups with both classes.
    pub groups: u64,
    /// Groups of one class, which are left out.
    pub groups_left_out: u64,
    /// Rows in groups with both classes.
    pub rows: u64,
}

/// Calibration of the rows whose score lies in one tenth of all scores. A row belongs to the tenth of the number of rows
/// with a lower score: rows of equal score stay together, and a tenth may then be empty, and is left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decile {
    /// Which tenth, from 1, the lowest scores.
    pub decile: u8,
    /// Rows.
    pub rows: u64,
    /// Weighted mean of p̂.
    pub predicted: f64,
    /// Weighted mean of y.
    pub observed: f64,
}

/// [`Metrics`] with what is told once rather than after every evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Detail {
    /// The figures of the whole set.
    #[serde(flatten)]
    pub metrics: Metrics,
    /// AUC within groups, where rows have them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grouped: Option<GroupedAuc>,
    /// Calibration by decile of the score, from the lowest; empty where a score is NaN.
    #[serde(default)]
    pub deciles: Vec<Decile>,
}

/// ln(1 + eˣ) without overflow for any x.
pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// The logistic function without overflow for any x.
pub fn sigmoid(x: f64) -> f64 {
    let e = (-x.abs()).exp();
    if x >= 0.0 { 1.0 / (1.0 + e) } else { e / (1.0 + e) }
}

/// Binary entropy H(p) in nats; 0 at p = 0 and p = 1.
pub fn entropy(p: f64) -> f64 {
    let term = |q: f64| if q > 0.0 { -q * q.ln() } else { 0.0 };
    term(p) + term(1.0 - p)
}

/// Collects logits and labels batch by batch; [`MetricsAccumulator::finish`] gives the metrics.
///
/// Keeps 8 bytes a row for the exact AUC. All sums are f64.
#[derive(Clone, Debug, Default)]
pub struct MetricsAccumulator {
    rows: u64,
    nan: bool,
    sum_ce: f64,
    sum_p: f64,
    sum_y: f64,
    sum_w: f64,
    /// (order-preserving image of the logit, weight) of the rows of each class.
    positive: Vec<(u32, f32)>,
    negative: Vec<(u32, f32)>,
    /// Group, image of the logit, weight, label of each row that has a group.
    grouped: Vec<(u64, u32, f32, bool)>,
}

impl MetricsAccumulator {
    /// An empty accumulator.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds rows. Labels are 0 or 1; without `weights` every row weighs 1. Rows whose weight is not
    /// positive (padding) are left out entirely. The slices must have the same length.
    pub fn push(&mut self, logits: &[f32], labels: &[f32], weights: Option<&[f32]>) {
        assert_eq!(logits.len(), labels.len(), "one label for each logit");
        if let Some(w) = weights {
            assert_eq!(logits.len(), w.len(), "one weight for each logit");
        }
        for (i, (&s, &y)) in logits.iter().zip(labels).enumerate() {
            let w = weights.map_or(1.0, |w| w[i]);
            if w > 0.0 {
                self.push_row(s, y >= 0.5, w);
            }
        }
    }

    /// Adds the real rows of a batch, with their weights and groups.
    pub fn push_batch(&mut self, logits: &[f32], batch: &Batch) {
        let n = batch.rows;
        let (labels, weights) = (&batch.labels[..n], &batch.weights[..n]);
        self.push(logits, labels, Some(weights));
        for (i, &group) in batch.group_ids.iter().take(n).enumerate().filter(|(i, _)| weights[*i] > 0.0) {
            self.grouped.push((group, rank_key(logits[i]), weights[i], labels[i] >= 0.5));
        }
    }

    fn push_row(&mut self, logit: f32, positive: bool, weight: f32) {
        let (s, w) = (f64::from(logit), f64::from(weight));
        self.rows += 1;
        self.nan |= logit.is_nan();
        // One-sided forms: an infinite logit on the right side costs 0, not ∞ − ∞.
        self.sum_ce += w * softplus(if positive { -s } else { s });
        self.sum_p += w * sigmoid(s);
        self.sum_w += w;
        if positive {
            self.sum_y += w;
            self.positive.push((rank_key(logit), weight));
        } else {
            self.negative.push((rank_key(logit), weight));
        }
    }

    /// Everything collected, for another process.
    pub fn to_words(&self) -> Vec<u64> {
        let pair = |e: &(u32, f32)| u64::from(e.0) << 32 | u64::from(e.1.to_bits());
        let mut w = vec![self.rows, u64::from(self.nan)];
        w.extend([self.sum_ce, self.sum_p, self.sum_y, self.sum_w].map(f64::to_bits));
        w.extend([self.positive.len(), self.negative.len()].map(|n| n as u64));
        w.extend(self.positive.iter().chain(&self.negative).map(pair));
        w.extend(self.grouped.iter().flat_map(|g| [g.0, pair(&(g.1, g.2)), u64::from(g.3)]));
        w
    }

    /// The reverse.
    ///
    /// # Panics
    /// If the words are not those of [`MetricsAccumulator::to_words`].
    pub fn from_words(w: &[u64]) -> Self {
        let pair = |x: &u64| ((x >> 32) as u32, f32::from_bits(*x as u32));
        let (positives, negatives) = (w[6] as usize, w[7] as usize);
        let (scores, grouped) = w[8..].split_at(positives + negatives);
        let group = |g: &[u64]| {
            let (key, weight) = pair(&g[1]);
            (g[0], key, weight, g[2] == 1)
        };
        MetricsAccumulator {
            rows: w[0],
            nan: w[1] == 1,
            sum_ce: f64::from_bits(w[2]),
            sum_p: f64::from_bits(w[3]),
            sum_y: f64::from_bits(w[4]),
            sum_w: f64::from_bits(w[5]),
            positive: scores[..positives].iter().map(pair).collect(),
            negative: scores[positives..].iter().map(pair).collect(),
            grouped: grouped.chunks_exact(3).map(group).collect(),
        }
    }

    /// Adds what `other` has collected.
    pub fn merge(&mut self, other: MetricsAccumulator) {
        self.rows += other.rows;
        self.nan |= other.nan;
        self.sum_ce += other.sum_ce;
        self.sum_p += other.sum_p;
        self.sum_y += other.sum_y;
        self.sum_w += other.sum_w;
        self.positive.extend(other.positive);
        self.negative.extend(other.negative);
        self.grouped.extend(other.grouped);
    }

    /// The metrics of everything pushed, with AUC by group and calibration by decile.
    pub fn finish_detail(mut self) -> Detail {
        let grouped = std::mem::take(&mut self.grouped);
        let deciles = if self.nan { vec![] } else { deciles(&self.positive, &self.negative) };
        let grouped = (!grouped.is_empty() && !self.nan).then(|| grouped_auc(grouped));
        Detail { metrics: self.finish(), grouped, deciles }
    }

    /// The metrics of everything pushed. A NaN logit leaves every figure but the counts undefined.
    pub fn finish(mut self) -> Metrics {
        let (rows, positives) = (self.rows, self.positive.len() as u64);
        let logloss = if self.nan { f64::NAN } else { self.sum_ce / self.sum_w };
        let defined = !self.nan;
        let two_classes = defined && !self.positive.is_empty() && !self.negative.is_empty();
        Metrics {
            rows,
            positives,
            ne: two_classes.then(|| logloss / entropy(self.sum_y / self.sum_w)),
            logloss,
            auc: two_classes.then(|| auc(&mut self.positive, &mut self.negative)),
            calibration: (defined && positives > 0).then(|| self.sum_p / self.sum_y),
        }
    }
}

/// Metrics of one set held in memory.
pub fn evaluate(logits: &[f32], labels: &[f32], weights: Option<&[f32]>) -> Metrics {
    let mut acc = MetricsAccumulator::new();
    acc.push(logits, labels, weights);
    acc.finish()
}

/// Integer image of a float with the same order; both zeros share one image, as they compare equal.
fn rank_key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits(); // −0 + 0 = +0
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// The logit of an image.
fn logit_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}

fn deciles(positive: &[(u32, f32)], negative: &[(u32, f32)]) -> Vec<Decile> {
    let mut all: Vec<(u32, f32, bool)> =
        positive.iter().map(|e| (e.0, e.1, true)).chain(negative.iter().map(|e| (e.0, e.1, false))).collect();
    all.sort_unstable_by_key(|e| (e.0, e.2, e.1.to_bits()));
    let n = all.len();
    // rows, Σ w·p̂, Σ w·y, Σ w
    let mut sums = [(0u64, 0.0f64, 0.0f64, 0.0f64); 10];
    let mut first = 0;
    for (i, &(key, w, y)) in all.iter().enumerate() {
        if key != all[first].0 {
            first = i;
        }
        let s = &mut sums[first * 10 / n];
        let w = f64::from(w);
        s.0 += 1;
        s.1 += w * sigmoid(f64::from(logit_of(key)));
        s.2 += if y { w } else { 0.0 };
        s.3 += w;
    }
    let one = |(i, s): (usize, &(u64, f64, f64, f64))| Decile {
        decile: i as u8 + 1,
        rows: s.0,
        predicted: s.1 / s.3,
        observed: s.2 / s.3,
    };
    sums.iter().enumerate().filter(|(_, s)| s.0 > 0).map(one).collect()
}

fn grouped_auc(mut rows: Vec<(u64, u32, f32, bool)>) -> GroupedAuc {
    rows.sort_unstable_by_key(|r| (r.0, r.1, r.3, r.2.to_bits()));
    let mut out = GroupedAuc { auc: None, groups: 0, groups_left_out: 0, rows: 0 };
    let (mut sum, mut weight) = (0.0f64, 0.0f64);
    let (mut positive, mut negative) = (vec![], vec![]);
    for group in rows.chunk_by(|a, b| a.0 == b.0) {
        positive.clear();
        negative.clear();
        for &(_, key, w, y) in group {
            if y { positive.push((key, w)) } else { negative.push((key, w)) }
        }
        if positive.is_empty() || negative.is_empty() {
            out.groups_left_out += 1;
            continue;
        }
        let w: f64 = group.iter().map(|r| f64::from(r.2)).sum();
        sum += w * auc(&mut positive, &mut negative);
        weight += w;
        out.groups += 1;
        out.rows += group.len() as u64;
    }
    out.auc = (out.groups > 0).then(|| sum / weight);
    out
}

/// Σ over pairs of w⁺·w⁻·(1 if s⁺ > s⁻, ½ if equal) / Σ w⁺ · Σ w⁻, by merging the sorted classes.
fn auc(positive: &mut [(u32, f32)], negative: &mut [(u32, f32)]) -> f64 {
    positive.sort_unstable_by_key(|e| e.0);
    negative.sort_unstable_by_key(|e| e.0);
    let (mut below, mut won, mut i, mut j) = (0.0_f64, 0.0_f64, 0, 0);
    let mut total_positive = 0.0;
    while i < positive.len() {
        let key = positive[i].0;
        while j < negative.len() && negative[j].0 < key {
            below += f64::from(negative[j].1);
            j += 1;
        }
        let mut tied = 0.0;
        while j < negative.len() && negative[j].0 == key {
            tied += f64::from(negative[j].1);
            j += 1;
        }
        let mut weight = 0.0;
        while i < positive.len() && positive[i].0 == key {
            weight += f64::from(positive[i].1);
            i += 1;
        }
        won += weight * (below + 0.5 * tied);
        below += tied;
        total_positive += weight;
    }
    let total_negative = below + negative[j..].iter().map(|e| f64::from(e.1)).sum::<f64>();
    won / (total_positive * total_negative)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, in O(n²).
    fn auc_by_pairs(s: &[f32], y: &[f32], w: &[f32]) -> Option<f64> {
        let (mut won, mut all) = (0.0, 0.0);
        for i in (0..s.len()).filter(|&i| y[i] == 1.0) {
            for j in (0..s.len()).filter(|&j| y[j] == 0.0) {
                let pair = f64::from(w[i]) * f64::from(w[j]);
                all += pair;
                won += pair * if s[i] > s[j] { 1.0 } else { 0.5 * f64::from(u8::from(s[i] == s[j])) };
            }
        }
        (all > 0.0).then(|| won / all)
    }

    proptest! {
        #[test]
        fn auc_equals_the_definition(rows in prop::collection::vec((-4i8..4, any::<bool>(), 1u8..5), 0..60)) {
            let s: Vec<f32> = rows.iter().map(|r| f32::from(r.0) * 0.5).collect();
            let y: Vec<f32> = rows.iter().map(|r| f32::from(u8::from(r.1))).collect();
            let w: Vec<f32> = rows.iter().map(|r| f32::from(r.2) * 0.25).collect();
            let (got, want) = (evaluate(&s, &y, Some(&w)).auc, auc_by_pairs(&s, &y, &w));
            prop_assert_eq!(got.is_some(), want.is_some());
            if let (Some(a), Some(b)) = (got, want) {
                prop_assert!((a - b).abs() < 1e-12, "{} {}", a, b);
            }
        }

        #[test]
        fn integer_weights_equal_repetition(rows in prop::collection::vec((-9f32..9., any::<bool>(), 0u8..4), 1..40)) {
            let s: Vec<f32> = rows.iter().map(|r| r.0).collect();
            let y: Vec<f32> = rows.iter().map(|r| f32::from(u8::from(r.1))).collect();
            let w: Vec<f32> = rows.iter().map(|r| f32::from(r.2)).collect();
            let repeat = |x: &[f32]| -> Vec<f32> {
                x.iter().zip(&rows).flat_map(|(&v, r)| std::iter::repeat_n(v, r.2.into())).collect()
            };
            let (a, b) = (evaluate(&s, &y, Some(&w)), evaluate(&repeat(&s), &repeat(&y), None));
            for (a, b) in [(a.ne, b.ne), (a.auc, b.auc), (a.calibration, b.calibration)] {
                prop_assert_eq!(a.is_some(), b.is_some());
                prop_assert!((a.unwrap_or(0.) - b.unwrap_or(0.)).abs() < 1e-9);
            }
        }

        #[test]
        fn batches_and_merge_change_nothing(rows in prop::collection::vec((-9f32..9., any::<bool>()), 2..40), cut in 0usize..40) {
            let s: Vec<f32> = rows.iter().map(|r| r.0).collect();
            let y: Vec<f32> = rows.iter().map(|r| f32::from(u8::from(r.1))).collect();
            let cut = cut.min(s.len());
            let mut a = MetricsAccumulator::new();
            a.push(&s[..cut], &y[..cut], None);
            let mut b = MetricsAccumulator::new();
            b.push(&s[cut..], &y[cut..], None);
            a.merge(b);
            let (got, want) = (a.finish(), evaluate(&s, &y, None));
            prop_assert_eq!(got.auc, want.auc);
            prop_assert!((got.logloss - want.logloss).abs() < 1e-12);
        }
    }

    fn batch(y: &[f32], w: &[f32], groups: &[u64]) -> Batch {
        // padding follows, and counts for nothing
        let pad = |v: &[f32]| [v, &[1.0, 0.0]].concat();
        Batch {
            rows: y.len(),
            capacity: y.len() + 2,
            labels: pad(y),
            weights: pad(w),
            group_ids: groups.to_vec(),
            ..Batch::default()
        }
    }

    proptest! {
        #[test]
        fn grouped_auc_and_deciles_equal_their_definitions(
            rows in prop::collection::vec((-3i8..3, any::<bool>(), 0u8..4, 0u64..6), 1..60),
            cut in 0usize..60,
        ) {
            let s: Vec<f32> = rows.iter().map(|r| f32::from(r.0) * 0.5).collect();
            let y: Vec<f32> = rows.iter().map(|r| f32::from(u8::from(r.1))).collect();
            let w: Vec<f32> = rows.iter().map(|r| f32::from(r.2) * 0.25).collect();
            let g: Vec<u64> = rows.iter().map(|r| r.3).collect();
            let cut = cut.min(s.len());
            let mut acc = MetricsAccumulator::new();
            acc.push_batch(&s[..cut], &batch(&y[..cut], &w[..cut], &g[..cut]));
            let mut rest = MetricsAccumulator::new();
            rest.push_batch(&s[cut..], &batch(&y[cut..], &w[cut..], &g[cut..]));
            acc.merge(rest);
            let d = acc.finish_detail();
            prop_assert_eq!(&d.metrics.auc, &evaluate(&s, &y, Some(&w)).auc);

            let real: Vec<usize> = (0..s.len()).filter(|&i| w[i] > 0.0).collect();
            let (mut sum, mut total, mut left_out, mut counted) = (0.0, 0.0, 0, 0);
            for group in 0..6 {
                let mine: Vec<usize> = real.iter().copied().filter(|&i| g[i] == group).collect();
                let pick = |v: &[f32]| mine.iter().map(|&i| v[i]).collect::<Vec<f32>>();
                let weight: f64 = pick(&w).iter().map(|v| f64::from(*v)).sum();
                match auc_by_pairs(&pick(&s), &pick(&y), &pick(&w)) {
                    Some(a) => {
                        sum += weight * a;
                        total += weight;
                        counted += 1;
                    }
                    None => left_out += u64::from(!mine.is_empty()),
                }
            }
            match d.grouped {
                None => prop_assert!(real.is_empty()),
                Some(got) => {
                    prop_assert_eq!((got.groups, got.groups_left_out), (counted, left_out));
                    prop_assert_eq!(got.auc.is_some(), counted > 0);
                    if let Some(a) = got.auc {
                        prop_assert!((a - sum / total).abs() < 1e-9);
                    }
                }
            }
            let mut want = vec![(0u64, 0.0, 0.0, 0.0); 10];
            for &i in &real {
                let lower = real.iter().filter(|&&j| s[j] < s[i]).count();
                let (x, v) = (&mut want[lower * 10 / real.len()], f64::from(w[i]));
                *x = (x.0 + 1, x.1 + v * sigmoid(f64::from(s[i])), x.2 + v * f64::from(y[i]), x.3 + v);
            }
            let want: Vec<_> = want.iter().enumerate().filter(|(_, x)| x.0 > 0).collect();
            prop_assert_eq!(d.deciles.len(), want.len());
            for (got, (i, x)) in d.deciles.iter().zip(want) {
                prop_assert_eq!((usize::from(got.decile), got.rows), (i + 1, x.0));
                prop_assert!((got.predicted - x.1 / x.3).abs() < 1e-9 && (got.observed - x.2 / x.3).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn images_of_logits_come_back() {
        for x in [0.0, 1.5, -1.5, f32::MIN_POSITIVE, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(logit_of(rank_key(x)), x);
        }
        let ten: Vec<f32> = (0..20).map(|i| i as f32 - 10.0).collect();
        let mut acc = MetricsAccumulator::new();
        acc.push(&ten, &[1.0; 20], None);
        let d = acc.finish_detail();
        assert!(d.grouped.is_none() && d.deciles.iter().all(|x| x.rows == 2 && x.observed == 1.0));
        assert_eq!(d.deciles.len(), 10);
        let back: Detail = serde_json::from_str(&serde_json::to_string(&d).unwrap()).unwrap();
        assert_eq!(back, d);
    }

    #[test]
    fn constant_base_rate_has_ne_one_and_auc_half() {
        let logit = (0.25f64 / 0.75).ln() as f32;
        let m = evaluate(&[logit; 8], &[1., 0., 0., 0., 1., 0., 0., 0.], None);
        assert!((m.ne.unwrap() - 1.0).abs() < 1e-6 && m.auc == Some(0.5), "{m:?}");
        assert!((m.calibration.unwrap() - 1.0).abs() < 1e-6);
        assert_eq!((m.rows, m.positives), (8, 2));
    }

    #[test]
    fn undefined_is_null_and_keys_keep_their_order() {
        let m = evaluate(&[0.5, -1.0], &[0.0, 0.0], None);
        let json = serde_json::to_string(&m).unwrap();
        let logloss = m.logloss;
        assert_eq!(
            json,
            format!(
                r#"{{"rows":2,"positives":0,"ne":null,"logloss":{logloss},"auc":null,"calibration":null}}"#
            )
        );
        assert!(serde_json::to_string(&evaluate(&[], &[], None)).unwrap().contains(r#""logloss":null"#));
    }

    #[test]
    fn extreme_logits_stay_finite_and_nan_is_seen() {
        let m = evaluate(&[f32::INFINITY, f32::NEG_INFINITY, 3e38], &[1.0, 0.0, 1.0], None);
        assert_eq!((m.logloss, m.auc), (0.0, Some(1.0)));
        let m = evaluate(&[f32::NAN, 0.0], &[1.0, 0.0], None);
        assert!(m.logloss.is_nan() && m.ne.is_none() && m.auc.is_none() && m.calibration.is_none());
        assert_eq!(evaluate(&[0.0, -0.0], &[1.0, 0.0], None).auc, Some(0.5));
    }
}
