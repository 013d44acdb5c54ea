//! The planted model behind `birkhoff synth`: a click probability known for every row.
//!
//! logit = intercept + numeric effects (not linear in the log count) + main effects of categories
//! (power-law vocabularies) + pairs (dot products of latent vectors) + triples (products of three
//! latent scalars) + category × numeric. Every effect is standardised under its own distribution, so
//! the shares of the logit's variance below are what each kind contributes in any world. Draws use
//! only +, −, ×, ÷ and square roots, which are exact everywhere; ln and exp enter the probability only.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::metrics::sigmoid;
use super::schema::{CRITEO_CATEGORICAL, CRITEO_NUMERIC};

/// Click rate that the intercept is set for.
pub const BASE_RATE: f64 = 0.25;

// Variance of the logit by kind of effect. Together they put the truth's NE near 0.775; main and
// numeric effects alone bring about two thirds of the gain.
const MAIN: f64 = 1.05;
const NUMERIC: f64 = 0.55;
const PAIRS: f64 = 0.34;
const TRIPLES: f64 = 0.10;
const MIXED: f64 = 0.22;

/// Width of the latent vectors of a pair.
const LATENT: usize = 2;

/// Falloff of a power law; quarters of an exponent need nothing but square roots.
#[derive(Clone, Copy)]
enum Tail {
    /// (k + 1)^−1.25
    Long,
    /// (k + 1)^−1.5
    Short,
}

/// (values, tail, share of missing rows, weight of the main effect).
const CATEGORIES: [(usize, Tail, f64, f64); CRITEO_CATEGORICAL] = [
    (200, Tail::Short, 0.00, 1.0),
    (300, Tail::Short, 0.00, 1.0),
    (3000, Tail::Short, 0.03, 0.7),
    (2000, Tail::Short, 0.03, 0.7),
    (50, Tail::Long, 0.00, 1.2),
    (12, Tail::Long, 0.12, 1.0),
    (2500, Tail::Short, 0.00, 0.8),
    (80, Tail::Long, 0.00, 1.0),
    (3, Tail::Long, 0.00, 0.8),
    (3000, Tail::Short, 0.00, 0.9),
    (1000, Tail::Short, 0.00, 0.8),
    (3500, Tail::Short, 0.03, 0.6),
    (800, Tail::Short, 0.00, 0.8),
    (20, Tail::Long, 0.00, 1.2),
    (1500, Tail::Short, 0.00, 0.7),
    (4000, Tail::Short, 0.03, 0.6),
    (9, Tail::Long, 0.00, 1.2),
    (600, Tail::Short, 0.00, 0.8),
    (400, Tail::Short, 0.44, 0.7),
    (4, Tail::Long, 0.44, 0.5),
    (2500, Tail::Short, 0.03, 0.6),
    (10, Tail::Long, 0.76, 0.6),
    (13, Tail::Long, 0.00, 1.2),
    (1800, Tail::Short, 0.03, 0.7),
    (40, Tail::Long, 0.44, 0.7),
    (1200, Tail::Short, 0.44, 0.6),
];
/// Columns that are missing together (as C19, C20, C25 and C26 are in Criteo's log).
const JOINTLY_MISSING: [usize; 4] = [18, 19, 24, 25];

/// (scale, heavy tail, share of missing rows, missing more often in active rows, weight).
const NUMBERS: [(f64, bool, f64, bool, f64); CRITEO_NUMERIC] = [
    (4.0, false, 0.45, true, 1.0),
    (30.0, true, 0.00, false, 1.0),
    (8.0, true, 0.21, false, 0.8),
    (6.0, false, 0.22, false, 0.8),
    (2000.0, true, 0.03, false, 1.2),
    (60.0, true, 0.22, true, 1.2),
    (9.0, false, 0.04, false, 1.0),
    (12.0, false, 0.00, false, 0.8),
    (50.0, true, 0.04, false, 0.8),
    (0.8, false, 0.45, true, 0.8),
    (3.0, false, 0.04, false, 1.2),
    (0.6, false, 0.76, false, 0.6),
    (7.0, false, 0.22, false, 0.8),
];

// Interactions join columns of few or moderately many values: their cells are seen often enough.
const PAIR_COLUMNS: [(usize, usize); 5] = [(4, 7), (5, 13), (8, 16), (22, 4), (18, 19)];
const TRIPLE_COLUMNS: [[usize; 3]; 2] = [[5, 8, 22], [13, 16, 8]];
const MIXED_COLUMNS: [(usize, usize); 3] = [(13, 4), (4, 5), (16, 10)];

/// Rows drawn to standardise the numeric effects and to set the intercept.
const CALIBRATION_ROWS: usize = 20_000;

/// What a row consists of, before it is written.
#[derive(Clone, Debug, PartialEq)]
pub struct Features {
    /// Integers; `None` = missing.
    pub numeric: [Option<i64>; CRITEO_NUMERIC],
    /// Index of each category in its vocabulary, most frequent first; `None` = missing.
    pub values: [Option<u32>; CRITEO_CATEGORICAL],
}

/// The contributions to a row's logit by kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts {
    /// Numeric effects.
    pub numeric: f64,
    /// Main effects of categories.
    pub main: f64,
    /// All interactions.
    pub interactions: f64,
}

/// A distribution over a column's values, and effects that belong to them.
struct Column {
    cumulative: Vec<f64>,
    missing: f64,
    /// Main effect of each value, and last of the missing value.
    main: Vec<f64>,
}

/// One numeric effect: a shape over ln(1 + max(v, 0)), then (x − mean)·scale.
struct Numeric {
    shape: usize,
    missing_effect: f64,
    mean: f64,
    scale: f64,
}

/// A world: every effect fixed by one number.
pub struct World {
    columns: Vec<Column>,
    numbers: Vec<Numeric>,
    /// Latent vectors of both columns, value by value.
    pairs: Vec<(Vec<f64>, Vec<f64>)>,
    triples: Vec<[Vec<f64>; 3]>,
    mixed: Vec<Vec<f64>>,
    intercept: f64,
}

/// A uniform number in [0, 1).
pub(super) fn uniform(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Nearly normal (twelve uniforms), without a logarithm.
fn normal(rng: &mut ChaCha8Rng) -> f64 {
    (0..12).map(|_| uniform(rng)).sum::<f64>() - 6.0
}

/// A generator for one purpose of one seed.
pub(super) fn generator(purpose: &[u8; 16], seed: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..16].copy_from_slice(purpose);
    key[16..24].copy_from_slice(&seed.to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// Moves effects to mean 0 and variance 1 under the weights.
fn standardise(effects: &mut [f64], weights: &[f64]) {
    let total: f64 = weights.iter().sum();
    let mean = effects.iter().zip(weights).map(|(e, w)| e * w).sum::<f64>() / total;
    effects.iter_mut().for_each(|e| *e -= mean);
    let variance = effects.iter().zip(weights).map(|(e, w)| e * e * w).sum::<f64>() / total;
    let scale = if variance > 0.0 { 1.0 / variance.sqrt() } else { 0.0 };
    effects.iter_mut().for_each(|e| *e *= scale);
}

/// Standardised effects of a column's present values.
fn latent(rng: &mut ChaCha8Rng, column: &Column) -> Vec<f64> {
    let weights = column.weights();
    let mut effects: Vec<f64> = weights.iter().map(|_| normal(rng)).collect();
    standardise(&mut effects, &weights);
    effects
}

impl Column {
    fn new(rng: &mut ChaCha8Rng, index: usize) -> Column {
        let (size, tail, missing, _) = CATEGORIES[index];
        let mut sum = 0.0;
        let mut cumulative: Vec<f64> = (0..size)
            .map(|k| {
                let x = (k + 2) as f64;
                sum += match tail {
                    Tail::Long => 1.0 / (x * x.sqrt().sqrt()),
                    Tail::Short => 1.0 / (x * x.sqrt()),
                };
                sum
            })
            .collect();
        cumulative.iter_mut().for_each(|c| *c /= sum);
        let mut column = Column { cumulative, missing, main: Vec::new() };
        let mut weights = column.weights();
        weights.iter_mut().for_each(|w| *w *= 1.0 - missing);
        weights.push(missing);
        column.main = weights.iter().map(|_| normal(rng)).collect();
        standardise(&mut column.main, &weights);
        column
    }

    /// Probability of each value among the present ones.
    fn weights(&self) -> Vec<f64> {
        let before = std::iter::once(0.0).chain(self.cumulative.iter().copied());
        self.cumulative.iter().zip(before).map(|(c, b)| c - b).collect()
    }

    fn draw(&self, rng: &mut ChaCha8Rng) -> u32 {
        let u = uniform(rng);
        self.cumulative.partition_point(|&c| c <= u).min(self.cumulative.len() - 1) as u32
    }
}

impl Numeric {
    fn raw(&self, value: Option<i64>) -> f64 {
        let Some(value) = value else { return self.missing_effect };
        let x = (value.max(0) as f64).ln_1p();
        match self.shape {
            0 => x / (1.0 + x),
            1 => 1.0 / (1.0 + (x - 2.0) * (x - 2.0)),
            2 => 0.3 * x,
            3 => f64::from(u8::from(x > 1.5)) - 0.5 * f64::from(u8::from(x > 3.5)),
            _ => 1.0 - 1.0 / (1.0 + (x - 2.5) * (x - 2.5)),
        }
    }

    fn effect(&self, value: Option<i64>) -> f64 {
        (self.raw(value) - self.mean) * self.scale
    }
}

impl World {
    /// The world of a number.
    pub fn new(world: u64) -> World {
        let rng = &mut generator(b"birkhoff world 1", world);
        let columns: Vec<Column> = (0..CRITEO_CATEGORICAL).map(|i| Column::new(rng, i)).collect();
        let numbers = (0..CRITEO_NUMERIC).map(|i| {
            let sign = if uniform(rng) < 0.5 { -1.0 } else { 1.0 };
            Numeric { shape: i % 5, missing_effect: 1.2 * uniform(rng) - 0.1, mean: 0.0, scale: sign }
        });
        let numbers: Vec<Numeric> = numbers.collect();
        let mut vector = |column: usize| -> Vec<f64> {
            let parts: Vec<Vec<f64>> = (0..LATENT).map(|_| latent(rng, &columns[column])).collect();
            (0..parts[0].len() * LATENT).map(|i| parts[i % LATENT][i / LATENT]).collect()
        };
        let pairs = PAIR_COLUMNS.map(|(a, b)| (vector(a), vector(b))).into();
        let triples = TRIPLE_COLUMNS.map(|c| c.map(|i| latent(rng, &columns[i]))).into();
        let mixed = MIXED_COLUMNS.map(|(c, _)| latent(rng, &columns[c])).into();
        let mut world = World { columns, numbers, pairs, triples, mixed, intercept: 0.0 };
        world.calibrate(rng);
        world
    }

    fn calibrate(&mut self, rng: &mut ChaCha8Rng) {
        let rows: Vec<Features> = (0..CALIBRATION_ROWS).map(|_| self.draw(rng)).collect();
        let n = rows.len() as f64;
        for (j, number) in self.numbers.iter_mut().enumerate() {
            let raw: Vec<f64> = rows.iter().map(|r| number.raw(r.numeric[j])).collect();
            number.mean = raw.iter().sum::<f64>() / n;
            let variance = raw.iter().map(|x| (x - number.mean) * (x - number.mean)).sum::<f64>() / n;
            number.scale /= variance.sqrt().max(1e-6);
        }
        let logits: Vec<f64> = rows.iter().map(|r| self.logit(r)).collect();
        let (mut low, mut high) = (-20.0, 20.0);
        for _ in 0..50 {
            let middle = 0.5 * (low + high);
            let rate = logits.iter().map(|s| sigmoid(s + middle)).sum::<f64>() / n;
            *if rate < BASE_RATE { &mut low } else { &mut high } = middle;
        }
        self.intercept = 0.5 * (low + high);
    }

    /// Draws a row's features.
    pub fn draw(&self, rng: &mut ChaCha8Rng) -> Features {
        // How active the row's user is: larger counts, and some integers missing more often.
        let activity = uniform(rng);
        let mut features = Features { numeric: [None; CRITEO_NUMERIC], values: [None; CRITEO_CATEGORICAL] };
        for (value, (scale, heavy, missing, informative, _)) in features.numeric.iter_mut().zip(NUMBERS) {
            let missing = if informative { missing * (0.5 + activity) } else { missing };
            let (present, u) = (uniform(rng) >= missing, 1.0 - uniform(rng));
            if present {
                let tail = if heavy { (1.0 / u).min(1e4) } else { 1.0 / u.sqrt() };
                *value = Some((scale * (0.25 + 1.5 * activity) * (tail - 1.0)).floor() as i64);
            }
        }
        // I2 is the column with negatives.
        features.numeric[1] = features.numeric[1].map(|v| v - 2);
        let joint = uniform(rng);
        for (i, (value, column)) in features.values.iter_mut().zip(&self.columns).enumerate() {
            let u = if JOINTLY_MISSING.contains(&i) { joint } else { uniform(rng) };
            let drawn = column.draw(rng);
            *value = (u >= column.missing).then_some(drawn);
        }
        features
    }

    /// The log-odds of a click.
    pub fn logit(&self, row: &Features) -> f64 {
        let parts = self.parts(row);
        self.intercept + parts.numeric + parts.main + parts.interactions
    }

    /// The log-odds without its intercept, by kind of effect.
    pub fn parts(&self, row: &Features) -> Parts {
        let share = |total: f64, weight: f64, sum: f64| (total / sum).sqrt() * weight;
        let sum_main: f64 = CATEGORIES.iter().map(|c| c.3 * c.3).sum();
        let sum_numeric: f64 = NUMBERS.iter().map(|c| c.4 * c.4).sum();
        let effects: [f64; CRITEO_NUMERIC] = std::array::from_fn(|j| self.numbers[j].effect(row.numeric[j]));
        let numeric: f64 = effects.iter().zip(NUMBERS).map(|(e, c)| e * c.4).sum();
        let main: f64 = (0..CRITEO_CATEGORICAL)
            .map(|c| {
                let effects = &self.columns[c].main;
                effects[row.values[c].map_or(effects.len() - 1, |v| v as usize)] * CATEGORIES[c].3
            })
            .sum();
        // A missing value takes part in no interaction.
        let pairs: f64 = (PAIR_COLUMNS.iter().zip(&self.pairs))
            .map(|(&(a, b), (left, right))| match (row.values[a], row.values[b]) {
                (Some(a), Some(b)) => {
                    let (a, b) = (a as usize * LATENT, b as usize * LATENT);
                    left[a..a + LATENT].iter().zip(&right[b..b + LATENT]).map(|(x, y)| x * y).sum()
                }
                _ => 0.0,
            })
            .sum();
        let triples: f64 = (TRIPLE_COLUMNS.iter().zip(&self.triples))
            .map(|(columns, effects)| {
                let factor = |(&c, e): (&usize, &Vec<f64>)| row.values[c].map_or(0.0, |v| e[v as usize]);
                columns.iter().zip(effects).map(factor).product::<f64>()
            })
            .sum();
        let mixed: f64 = (MIXED_COLUMNS.iter().zip(&self.mixed))
            .map(|(&(c, j), e)| row.values[c].map_or(0.0, |v| e[v as usize]) * effects[j])
            .sum();
        Parts {
            numeric: numeric * share(NUMERIC, 1.0, sum_numeric),
            main: main * share(MAIN, 1.0, sum_main),
            interactions: pairs * share(PAIRS, 1.0, (PAIR_COLUMNS.len() * LATENT) as f64)
                + triples * share(TRIPLES, 1.0, TRIPLE_COLUMNS.len() as f64)
                + mixed * share(MIXED, 1.0, MIXED_COLUMNS.len() as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::metrics::evaluate;

    fn variance(x: &[f64]) -> f64 {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / x.len() as f64
    }

    #[test]
    fn every_world_keeps_the_shares_and_the_click_rate() {
        for seed in 0..6 {
            let world = World::new(seed);
            let rng = &mut generator(b"test of planted.", seed);
            let rows: Vec<Features> = (0..20_000).map(|_| world.draw(rng)).collect();
            let parts: Vec<Parts> = rows.iter().map(|r| world.parts(r)).collect();
            let of = |f: fn(&Parts) -> f64| variance(&parts.iter().map(f).collect::<Vec<_>>());
            let (main, numeric, interactions) = (of(|p| p.main), of(|p| p.numeric), of(|p| p.interactions));
            assert!((main / MAIN - 1.0).abs() < 0.2, "{seed}: main {main}");
            // Activity makes the numeric effects correlate, so their sum varies more or less.
            assert!((0.4..2.5).contains(&(numeric / NUMERIC)), "{seed}: numeric {numeric}");
            assert!((0.2..0.9).contains(&interactions), "{seed}: interactions {interactions}");
            let rate = rows.iter().map(|r| sigmoid(world.logit(r))).sum::<f64>() / rows.len() as f64;
            assert!((rate - BASE_RATE).abs() < 0.01, "{seed}: {rate}");
        }
    }

    /// NE, in expectation over the labels, of the logit without some of its parts.
    fn expected_ne(world: &World, rows: &[Features], keep: impl Fn(&Parts) -> f64) -> f64 {
        let (mut logits, mut labels, mut weights) = (vec![], vec![], vec![]);
        for row in rows {
            let p = sigmoid(world.logit(row));
            for (label, weight) in [(1.0, p), (0.0, 1.0 - p)] {
                logits.push((world.intercept + keep(&world.parts(row))) as f32);
                labels.push(label);
                weights.push(weight as f32);
            }
        }
        evaluate(&logits, &labels, Some(&weights)).ne.unwrap()
    }

    #[test]
    fn the_default_world_has_the_announced_difficulty() {
        let world = World::new(super::super::synth::DEFAULT_WORLD);
        let rng = &mut generator(b"test of planted.", 1);
        let rows: Vec<Features> = (0..20_000).map(|_| world.draw(rng)).collect();
        let truth = expected_ne(&world, &rows, |p| p.main + p.numeric + p.interactions);
        let additive = expected_ne(&world, &rows, |p| 0.9 * (p.main + p.numeric));
        println!("truth {truth:.4}, without interactions {additive:.4}");
        assert!((0.75..0.82).contains(&truth), "{truth}");
        let share = (1.0 - additive) / (1.0 - truth);
        assert!((0.5..0.8).contains(&share), "share of the gain without interactions: {share}");
    }
}
