//! Learning-rate schedules (math.md, sections 7 and 8): linear warm-up, then constant, cosine, linear
//! or step. What a plateau takes off comes on top of a constant rate, in the trainer: it depends on evaluations.

use serde::{Deserialize, Serialize};

/// What follows the warm-up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Decay {
    /// The base rate to the end.
    Constant,
    /// Half a cosine from the base rate down to `floor` (a factor of the base rate) at step T.
    Cosine {
        /// The factor that is reached at the end of the run.
        #[serde(default)]
        floor: f64,
    },
    /// A straight line from the base rate down to `floor` at step T.
    Linear {
        /// The factor that is reached at the end of the run.
        #[serde(default)]
        floor: f64,
    },
    /// The rate is multiplied by `factor` once for each of the fractions `at` of the run that is reached.
    Step {
        /// Multiplied in at each border.
        #[serde(default = "default_factor")]
        factor: f64,
        /// Borders, as fractions of the whole run.
        #[serde(default = "default_borders")]
        at: Vec<f64>,
    },
}

fn default_factor() -> f64 {
    0.316
}

fn default_borders() -> Vec<f64> {
    vec![0.8, 0.9]
}

impl Decay {
    /// mHC's schedule: ×0.316 at 0.8 and again at 0.9 of the run.
    pub fn step() -> Decay {
        Decay::Step { factor: default_factor(), at: default_borders() }
    }
}

/// The factor of the base rate at each update of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// Updates of linear warm-up, W.
    pub warmup: u64,
    /// Updates of the whole run, T.
    pub total: u64,
    /// What follows the warm-up.
    pub decay: Decay,
}

impl Schedule {
    /// The factor at update `t`, t = 0 being the first. Past the end of the run the last value holds.
    pub fn factor(&self, t: u64) -> f64 {
        let (step, warmup, total) = (t as f64, self.warmup as f64, self.total as f64);
        let ramp = if t < self.warmup { (step + 1.0) / warmup } else { 1.0 };
        // A run that ends inside its warm-up has no part after it: the divisor stays positive.
        let progress = ((step - warmup) / (total - warmup).max(1.0)).min(1.0);
        match &self.decay {
            Decay::Constant => ramp,
            Decay::Cosine { .. } | Decay::Linear { .. } if t < self.warmup => ramp,
            Decay::Cosine { floor } => {
                floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
            }
            Decay::Linear { floor } => floor + (1.0 - floor) * (1.0 - progress),
            Decay::Step { factor, at } => {
                // The slack keeps 0.9·T, rounded up, from moving a border by one step.
                let passed = at.iter().filter(|a| step >= *a * total * (1.0 - 1e-12)).count();
                ramp * factor.powi(passed as i32)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn schedule(decay: Decay, warmup: u64, total: u64) -> Schedule {
        Schedule { warmup, total, decay }
    }

    proptest! {
        #[test]
        fn factors_are_finite_and_bounded(w in 0u64..50, total in 0u64..200, t in 0u64..300, floor in 0f64..1.) {
            for decay in [Decay::Constant, Decay::Cosine { floor }, Decay::Linear { floor }, Decay::step()] {
                let f = schedule(decay, w, total).factor(t);
                prop_assert!(f.is_finite() && (-1e-12..=1.0 + 1e-12).contains(&f), "{}", f);
            }
        }

        #[test]
        fn rises_in_the_warmup_and_never_after(w in 0u64..20, rest in 1u64..200, floor in 0f64..1.) {
            for decay in [Decay::Constant, Decay::Cosine { floor }, Decay::Linear { floor }, Decay::Step { factor: 0.5, at: vec![0.95] }] {
                let s = schedule(decay, w, 20 * w + rest);
                for t in 0..s.total {
                    let (a, b) = (s.factor(t), s.factor(t + 1));
                    prop_assert!(if t + 1 < w { b > a } else { b <= a + 1e-12 }, "t = {}: {} {}", t, a, b);
                }
            }
        }

        #[test]
        fn step_borders_follow_integer_arithmetic(total in 1u64..100_000, a in 1u64..10) {
            let s = schedule(Decay::Step { factor: 0.5, at: vec![a as f64 / 10.0] }, 0, total);
            let border = (a * total).div_ceil(10);
            prop_assert_eq!(s.factor(border), 0.5);
            prop_assert_eq!(s.factor(border - 1), 1.0);
        }
    }

    #[test]
    fn cosine_ends_at_its_floor() {
        let s = schedule(Decay::Cosine { floor: 0.1 }, 10, 110);
        assert_eq!(s.factor(9), 1.0);
        assert!((s.factor(60) - 0.55).abs() < 1e-12);
        assert!((s.factor(110) - 0.1).abs() < 1e-12 && s.factor(1000) == s.factor(110));
    }

    #[test]
    fn a_line_is_straight() {
        let s = schedule(Decay::Linear { floor: 0.2 }, 10, 110);
        assert_eq!((s.factor(9), s.factor(10)), (1.0, 1.0));
        assert!((s.factor(60) - 0.6).abs() < 1e-12 && (s.factor(110) - 0.2).abs() < 1e-12);
        assert_eq!(s.factor(1000), s.factor(110));
    }

    #[test]
    fn reads_from_toml_with_defaults() {
        assert_eq!(toml::from_str::<Decay>("kind = 'step'").unwrap(), Decay::step());
        assert_eq!(toml::from_str::<Decay>("kind = 'cosine'").unwrap(), Decay::Cosine { floor: 0.0 });
        assert!(toml::from_str::<Decay>("kind = 'cosine'\nflor = 1").is_err());
    }
}
