//! NE, log loss, AUC and calibration from logits (math.md, section 6 and the fine print in 8).
//!
//! The public path is `train::metrics`; the code sits on this floor because the synthetic click log
//! reports the same figures of its planted truth, and a room imports only from rooms below it.

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
