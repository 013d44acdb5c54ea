//! Which [`Variant`] computes a product fastest on an adapter.
//!
//! A cost model orders the family of variants; its first is the default. Where the caller can measure,
//! the first few are timed once per shape class (sizes by powers of two, divisibility, layout), within
//! a budget that includes their compilation, and the winner is remembered on disk per adapter.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use web_time::Instant;
use wgpu::DeviceType;

use super::matmul_wgsl::{MatmulSpec, Variant, kernels, scratch_len};
use crate::gpu::kernel::Kernel;

/// Raised when the kernels change enough to make old measurements worthless.
const FORMAT: u32 = 1;

/// No further candidate is tried once a class has cost this much.
const BUDGET: Duration = Duration::from_millis(900);

/// Most variants measured for one class.
const MOST_CANDIDATES: usize = 3;

/// The adapter that measurements are valid for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterKey {
    /// Adapter name, as wgpu reports it.
    pub name: String,
    /// Driver and its version.
    pub driver: String,
    /// Software (`Cpu`) or some kind of GPU.
    pub kind: DeviceType,
}

impl From<&wgpu::AdapterInfo> for AdapterKey {
    fn from(info: &wgpu::AdapterInfo) -> Self {
        let driver = format!("{} {} {:?}", info.driver, info.driver_info, info.backend);
        Self { name: info.name.clone(), driver, kind: info.device_type }
    }
}

/// Times one candidate: builds pipelines for the kernels, runs them on buffers of the product's sizes
/// (the second argument is the f32 length of `Scratch(0)`, 0 for none), and returns the seconds of one
/// run; two runs after a first to warm up are enough, and extra inputs are not used. Of a large product
/// the kernels cover a part, so the buffers may be longer than what they read. A value that is not finite means that the candidate cannot run here.
pub type Measure<'a> = &'a mut dyn FnMut(&[Kernel], u64) -> f64;

/// The choices for one adapter, in memory and on disk.
#[derive(Debug)]
pub struct Tuner {
    adapter: AdapterKey,
    path: Option<PathBuf>,
    classes: BTreeMap<String, Variant>,
    measures: bool,
}

/// The file, `matmul-<hash of name and driver>.json`.
#[derive(Serialize, Deserialize)]
struct Memory {
    format: u32,
    adapter: String,
    driver: String,
    classes: BTreeMap<String, Variant>,
}

impl Tuner {
    /// The tuner of an adapter, with what earlier runs remembered under the user's cache directory
    /// (`$XDG_CACHE_HOME`, else `~/.cache`). `BIRKHOFF_NO_TUNE=1` makes it use the defaults only.
    pub fn open(adapter: AdapterKey) -> Self {
        if std::env::var("BIRKHOFF_NO_TUNE").is_ok_and(|v| !v.is_empty() && v != "0") {
            return Self { adapter, path: None, classes: BTreeMap::new(), measures: false };
        }
        let dir = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        let cache = dir("XDG_CACHE_HOME").or_else(|| dir("HOME").map(|home| home.join(".cache")));
        Self::in_dir(adapter, cache.map(|c| c.join("birkhoff")).as_deref())
    }

    /// The same with the memory in `dir`, or with none.
    pub fn in_dir(adapter: AdapterKey, dir: Option<&Path>) -> Self {
        let id = format!("{}\n{}", adapter.name, adapter.driver);
        let hash = xxhash_rust::xxh3::xxh3_64(id.as_bytes());
        let path = dir.map(|d| d.join(format!("matmul-{hash:016x}.json")));
        let mut tuner = Self { adapter, path, classes: BTreeMap::new(), measures: true };
        tuner.classes = tuner.read();
        tuner
    }

    /// Where the choices are kept, if anywhere.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The variant for a product: remembered, else measured (when `measure` is given), else the
    /// default. A failure to write the memory is no error: the next run measures again.
    pub fn choose(&mut self, spec: &MatmulSpec, measure: Option<Measure<'_>>) -> Variant {
        let family = candidates(spec, self.adapter.kind);
        let Some(measure) = measure.filter(|_| self.measures) else {
            return self.classes.get(&class(spec)).copied().unwrap_or(family[0]);
        };
        if let Some(known) = self.classes.get(&class(spec)) {
            return *known;
        }
        let (start, part) = (Instant::now(), trial(spec));
        let mut best = (f64::INFINITY, family[0]);
        for variant in family {
            let seconds = measure(&kernels(&part, None, variant), scratch_len(&part, None, variant));
            if seconds < best.0 {
                best = (seconds, variant);
            }
            if start.elapsed() > BUDGET {
                break;
            }
        }
        if best.0.is_finite() {
            self.classes.insert(class(spec), best.1);
            if let Err(error) = self.write() {
                tracing::debug!("matrix product choices not written: {error}");
            }
        }
        best.1
    }

    /// The file's choices for this adapter; none when it is absent, damaged or of another format.
    fn read(&self) -> BTreeMap<String, Variant> {
        let text = self.path.as_ref().and_then(|p| fs::read(p).ok()).unwrap_or_default();
        let Ok(memory) = serde_json::from_slice::<Memory>(&text) else { return BTreeMap::new() };
        let ours = memory.format == FORMAT
            && memory.adapter == self.adapter.name
            && memory.driver == self.adapter.driver;
        if !ours {
            return BTreeMap::new();
        }
        memory.classes.into_iter().filter(|(_, v)| v.is_valid()).collect()
    }

    /// Replaces the file, keeping what other processes added, so that readers see all of it or none.
    fn write(&self) -> std::io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut classes = self.read();
        classes.extend(self.classes.iter().map(|(k, v)| (k.clone(), *v)));
        let memory = Memory {
            format: FORMAT,
            adapter: self.adapter.name.clone(),
            driver: self.adapter.driver.clone(),
            classes,
        };
        let dir = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(dir)?;
        let scratch = path.with_extension(format!("json.{}", std::process::id()));
        fs::write(&scratch, serde_json::to_vec_pretty(&memory)?)?;
        fs::rename(&scratch, path).inspect_err(|_| {
            let _ = fs::remove_file(&scratch);
        })
    }
}

/// A part of the product that runs in some hundredths of a second on a software driver: fewer rows and
/// products, with the same layout and divisibility. Not for sums over the batch, whose chunks it would
/// change.
fn trial(spec: &MatmulSpec) -> MatmulSpec {
    const FLOPS: f64 = 3e8;
    let mut part = MatmulSpec { accumulate: None, ..*spec };
    while part.flops() > FLOPS && part.m > 256 && part.m.is_multiple_of(32) {
        part.m /= 2;
    }
    while part.flops() > FLOPS && part.batch > 64 && !part.reduce_batch {
        part.batch = part.batch.div_ceil(2);
    }
    part
}

/// The class of shapes that share a measurement: layout, batch rule, sizes rounded up to powers of
/// two, and which of m, n, k are multiples of 4.
pub fn class(spec: &MatmulSpec) -> String {
    let size = |name: char, n: u32, stored: bool| {
        let vec = if !stored {
            ""
        } else if n.is_multiple_of(4) {
            "v"
        } else {
            "s"
        };
        format!("{name}{}{vec}", n.next_power_of_two().trailing_zeros())
    };
    let flag = |on: bool, yes: &'static str, no: &'static str| if on { yes } else { no };
    format!(
        "{}-{}-{}-{} {}{} {}{}{}",
        size('b', spec.batch, false),
        size('m', spec.m, true),
        size('n', spec.n, true),
        size('k', spec.k, true),
        flag(spec.trans_a, "t", "n"),
        flag(spec.trans_b, "t", "n"),
        flag(spec.a_batched, "b", "s"),
        flag(spec.b_batched, "b", "s"),
        flag(spec.reduce_batch, " sum", ""),
    )
}

/// The variant used without a measurement.
pub fn default_variant(spec: &MatmulSpec, kind: DeviceType) -> Variant {
    candidates(spec, kind)[0]
}

/// The few variants worth measuring for a product, best guess first; never empty.
pub fn candidates(spec: &MatmulSpec, kind: DeviceType) -> Vec<Variant> {
    if kind == DeviceType::Cpu { software(spec) } else { hardware(spec) }
}

/// Register tiles by a cost model of llvmpipe: a vector load costs about as much as 45 multiply-adds
/// a lane (it is done lane by lane), a scalar one about 18, and a tile beyond 144 accumulators spills.
fn software(spec: &MatmulSpec) -> Vec<Variant> {
    const TILES: [(u32, u32); 12] = [
        (16, 8),
        (12, 12),
        (12, 8),
        (8, 12),
        (8, 16),
        (8, 8),
        (16, 4),
        (8, 4),
        (4, 8),
        (4, 4),
        (1, 4),
        (8, 1),
    ];
    let per_value = |inner: u32| if inner.is_multiple_of(4) { 11.0 } else { 18.0 };
    let rows = if spec.batch > 1 && spec.a_batched && !spec.b_batched && !spec.trans_a {
        spec.m as u64 * spec.batch as u64
    } else {
        spec.m as u64
    };
    let load_a = per_value(if spec.trans_a { spec.m } else { spec.k });
    let load_b = per_value(if spec.trans_b { spec.k } else { spec.n });
    let cost = |&(tm, tn): &(u32, u32)| {
        let tiles = rows.div_ceil(tm as u64) * spec.n.div_ceil(tn) as u64;
        let step = 10.0 + load_a * tm as f64 + load_b * tn as f64 + (tm * tn) as f64;
        let store = if spec.n.is_multiple_of(4) { 15.0 } else { 40.0 } * (tm * tn) as f64;
        tiles as f64 * (step * spec.k as f64 + store)
    };
    let mut tiles = TILES.to_vec();
    tiles.sort_by(|x, y| cost(x).total_cmp(&cost(y)));
    tiles.truncate(MOST_CANDIDATES);
    tiles.into_iter().map(|(tm, tn)| with_split(spec, Variant::register(tm, tn), tm, tn, 256)).collect()
}

/// Workgroup-memory tiles for large results, small register tiles otherwise.
fn hardware(spec: &MatmulSpec) -> Vec<Variant> {
    let register = |tm, tn| {
        let variant = Variant::Register { tm, tn, threads: 64, split: 1 };
        with_split(spec, variant, tm, tn, 16_384)
    };
    // A workgroup of 64 invocations stands behind each 64 × 64 tile.
    let shared = |tile| with_split(spec, Variant::Shared { tile, split: 1 }, 64, 64, 256);
    let rows = if spec.a_batched && !spec.b_batched { spec.m.saturating_mul(spec.batch) } else { spec.m };
    if spec.n == 1 {
        vec![register(1, 1), register(4, 1)]
    } else if rows >= 48 && spec.n >= 48 {
        vec![shared(4), shared(8), register(4, 4)]
    } else {
        vec![register(4, 4), register(8, 4), register(8, 8)]
    }
}

/// Adds chunks of the sum where the result has too few tiles to keep `target` of them in flight.
fn with_split(spec: &MatmulSpec, variant: Variant, tm: u32, tn: u32, target: u64) -> Variant {
    let tiles = spec.m.div_ceil(tm) as u64 * spec.n.div_ceil(tn) as u64 * spec.out_batch() as u64;
    let sum = spec.k as u64 * if spec.reduce_batch { spec.batch as u64 } else { 1 };
    let parts = (target / tiles.max(1)).min(sum / 128).max(1);
    variant.with_split(parts as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(kind: DeviceType) -> AdapterKey {
        AdapterKey { name: "a".into(), driver: "d 1".into(), kind }
    }

    fn tuner(dir: &Path) -> Tuner {
        Tuner::in_dir(adapter(DeviceType::Cpu), Some(dir))
    }

    /// Measures by a made-up rule: the `fast`-th candidate asked about wins; counts the questions.
    fn rule(fast: usize, asked: &mut usize) -> impl FnMut(&[Kernel], u64) -> f64 + use<'_> {
        move |kernels, scratch| {
            assert_eq!(scratch > 0, kernels.len() == 2);
            *asked += 1;
            if *asked == fast { 1.0 } else { 2.0 }
        }
    }

    #[test]
    fn the_fastest_is_chosen_and_remembered() {
        let dir = tempfile::tempdir().expect("a folder");
        let spec = MatmulSpec::plain(4096, 256, 256);
        let family = candidates(&spec, DeviceType::Cpu);
        let mut asked = 0;
        let chosen = tuner(dir.path()).choose(&spec, Some(&mut rule(2, &mut asked)));
        assert_eq!(chosen, family[1]);
        assert_eq!(asked, family.len());

        let mut again = 0;
        assert_eq!(tuner(dir.path()).choose(&spec, Some(&mut rule(1, &mut again))), family[1]);
        assert_eq!(tuner(dir.path()).choose(&MatmulSpec::plain(3000, 200, 252), None), family[1]);
        assert_eq!(again, 0);

        let other = AdapterKey { driver: "d 2".into(), ..adapter(DeviceType::Cpu) };
        assert_eq!(Tuner::in_dir(other, Some(dir.path())).choose(&spec, None), family[0]);
    }

    #[test]
    fn a_damaged_file_is_ignored_and_replaced() {
        let dir = tempfile::tempdir().expect("a folder");
        let spec = MatmulSpec::plain(64, 64, 64);
        let path = tuner(dir.path()).path().expect("a path").to_path_buf();
        let key = class(&spec);
        let wild = r#"{"register":{"tm":99,"tn":8,"threads":32,"split":1}}"#;
        let good_frame =
            format!(r#"{{"format":{FORMAT},"adapter":"a","driver":"d 1","classes":{{"{key}":{wild}}}}}"#);
        for text in ["", "{", "[1]", "\u{0}\u{1}", "{\"format\":1}", &good_frame] {
            fs::write(&path, text).expect("written");
            assert_eq!(tuner(dir.path()).choose(&spec, None), candidates(&spec, DeviceType::Cpu)[0]);
            let mut asked = 0;
            tuner(dir.path()).choose(&spec, Some(&mut rule(1, &mut asked)));
            assert!(asked > 0, "{text:?} was believed");
            assert!(tuner(dir.path()).classes.contains_key(&key), "{text:?} was not replaced");
        }
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 1, "temporary files are left");
    }

    #[test]
    fn two_tuners_keep_each_others_choices() {
        let dir = tempfile::tempdir().expect("a folder");
        let (x, y) = (MatmulSpec::plain(64, 64, 64), MatmulSpec::plain(640, 64, 64));
        let (mut one, mut two) = (tuner(dir.path()), tuner(dir.path()));
        one.choose(&x, Some(&mut |_, _| 1.0));
        two.choose(&y, Some(&mut |_, _| 1.0));
        assert_eq!(tuner(dir.path()).classes.len(), 2);
    }

    #[test]
    fn a_candidate_that_cannot_run_is_never_chosen() {
        let spec = MatmulSpec::plain(64, 64, 64);
        let family = candidates(&spec, DeviceType::DiscreteGpu);
        let mut asked = 0;
        let mut tuner = Tuner::in_dir(adapter(DeviceType::DiscreteGpu), None);
        let mut measure = |_: &[Kernel], _: u64| {
            asked += 1;
            if asked == 2 { 1.0 } else { f64::NAN }
        };
        assert_eq!(tuner.choose(&spec, Some(&mut measure)), family[1]);
    }

    #[test]
    fn trials_are_short_and_alike() {
        let big = MatmulSpec { batch: 3, a_batched: true, ..MatmulSpec::plain(1024, 1024, 1024) };
        let part = trial(&big);
        assert!(part.flops() <= big.flops() / 4.0 && part.m >= 128 && part.m.is_multiple_of(16));
        assert_eq!((part.n, part.k, part.batch), (1024, 1024, 3));
        let small = MatmulSpec::plain(4096, 64, 64);
        assert_eq!(trial(&small), small);
    }

    #[test]
    fn defaults_fit_the_shape() {
        for kind in [DeviceType::Cpu, DeviceType::DiscreteGpu] {
            let tall = MatmulSpec { trans_a: true, ..MatmulSpec::plain(32, 32, 27_648) };
            assert_eq!(kernels(&tall, None, default_variant(&tall, kind)).len(), 2, "{kind:?} must split");
            let wide = MatmulSpec::plain(27_648, 32, 32);
            assert_eq!(kernels(&wide, None, default_variant(&wide, kind)).len(), 1);
            for size in [1, 3, 8, 27, 64, 1000] {
                for spec in [MatmulSpec::plain(size, 1, 5), MatmulSpec::plain(1, size, 5)] {
                    for variant in candidates(&spec, kind) {
                        assert!(variant.is_valid());
                    }
                }
            }
        }
        let big = MatmulSpec::plain(1024, 1024, 1024);
        assert!(matches!(default_variant(&big, DeviceType::Cpu), Variant::Register { .. }));
        assert!(matches!(default_variant(&big, DeviceType::DiscreteGpu), Variant::Shared { .. }));
    }
}
