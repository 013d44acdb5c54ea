//! The file of a sweep: what runs it asks for.

use anyhow::{Context, bail};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// More runs than this are a mistake in a grid.
const MAX_RUNS: usize = 10_000;

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    #[serde(default)]
    train: Files,
    #[serde(default)]
    valid: Files,
    split: Option<String>,
    #[serde(alias = "split-by")]
    split_by: Option<String>,
    config: Option<PathBuf>,
    schema: Option<PathBuf>,
    cache: Option<PathBuf>,
    #[serde(default)]
    options: Vec<String>,
    #[serde(default)]
    set: Table,
    seeds: Option<Seeds>,
    #[serde(default)]
    grid: Table,
    #[serde(default)]
    run: Vec<RawRun>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRun {
    name: String,
    #[serde(default)]
    set: Table,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a number of seeds or a list of them, such as 3 or [1, 2, 3]")]
enum Seeds {
    Count(u64),
    List(Vec<u64>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a file or a list of files")]
enum Files {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

impl Default for Files {
    fn default() -> Self {
        Files::Several(vec![])
    }
}

/// A model of the sweep, trained once for each seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    /// The name of its folder.
    pub name: String,
    /// `KEY=VALUE` of `--set`, in order.
    pub sets: Vec<String>,
}

/// A sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SweepFile {
    /// Training rows: files and patterns.
    pub train: Vec<String>,
    /// Validation rows.
    pub valid: Vec<String>,
    /// `--split`, in place of validation rows.
    pub split: Option<String>,
    /// `--split-by`.
    pub split_by: Option<String>,
    /// The configuration that everything begins from.
    pub config: Option<PathBuf>,
    /// The columns of the data.
    pub schema: Option<PathBuf>,
    /// Where encoded rows are kept: a folder, or `memory`.
    pub cache: Option<PathBuf>,
    /// Further options of `birkhoff train`.
    pub options: Vec<String>,
    /// The models, the first being what the others are compared with.
    pub variants: Vec<Variant>,
    /// Seeds.
    pub seeds: Vec<u64>,
}

impl SweepFile {
    /// Reads a file. Paths in it are relative to its folder.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("{}: cannot read", path.display()))?;
        Self::parse(&path.display().to_string(), path.parent().unwrap_or(Path::new("")), &text)
    }

    fn parse(name: &str, folder: &Path, text: &str) -> anyhow::Result<Self> {
        let raw: Raw = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(1, |s| {
                1 + text.as_bytes()[..s.start.min(text.len())].iter().filter(|&&b| b == b'\n').count()
            });
            anyhow::anyhow!("{name}:{line}: {}", e.message().replace('\n', " "))
        })?;
        let seeds = match raw.seeds {
            None => vec![1],
            Some(Seeds::Count(n)) => (1..=n).collect(),
            Some(Seeds::List(list)) => list,
        };
        if seeds.is_empty() || (1..seeds.len()).any(|i| seeds[..i].contains(&seeds[i])) {
            bail!("{name}: seeds = {seeds:?}: expected at least one, none of them twice");
        }
        let grid = grid(name, &raw.grid)?;
        let runs = match raw.run.len() {
            0 => vec![RawRun { name: String::new(), set: Table::new() }],
            _ => raw.run,
        };
        let mut total = runs.len().saturating_mul(seeds.len());
        grid.iter().for_each(|g| total = total.saturating_mul(g.1.len()));
        if total > MAX_RUNS {
            bail!("{name}: {total} runs; more than {MAX_RUNS} are surely not meant");
        }
        let common = sets(&raw.set);
        let mut variants: Vec<Variant> = vec![];
        for run in &runs {
            let own = sets(&run.set);
            for point in points(&grid) {
                let mut parts: Vec<String> = vec![];
                if !run.name.is_empty() {
                    parts.push(run.name.clone());
                }
                parts.extend(point.iter().map(|(k, v)| format!("{}={}", short(k, &grid), show(v))));
                let variant = if parts.is_empty() { "base".into() } else { clean(&parts.join(",")) };
                if variants.iter().any(|v| v.name == variant) {
                    bail!(
                        "{name}: two runs would be called {variant:?}; name them in [[run]], each differently"
                    );
                }
                let mut all = common.clone();
                all.extend(own.clone());
                all.extend(point.iter().map(|(k, v)| format!("{k}={v}")));
                variants.push(Variant { name: variant, sets: all });
            }
        }
        let at = |p: Option<PathBuf>| p.map(|p| folder.join(p));
        let files = |f: Files| -> Vec<String> {
            let files = match f {
                Files::One(f) => vec![f],
                Files::Several(f) => f,
            };
            files.into_iter().map(|f| folder.join(f).display().to_string()).collect()
        };
        Ok(SweepFile {
            train: files(raw.train),
            valid: files(raw.valid),
            split: raw.split,
            split_by: raw.split_by,
            config: at(raw.config),
            schema: at(raw.schema),
            cache: raw.cache.map(|c| if c == Path::new("memory") { c } else { folder.join(c) }),
            options: raw.options,
            variants,
            seeds,
        })
    }
}

/// Dotted keys and their values; a table's keys are keys of their own.
fn leaves(prefix: &str, t: &Table, out: &mut Vec<(String, Value)>) {
    for (k, v) in t {
        let key = if prefix.is_empty() { k.clone() } else { format!("{prefix}.{k}") };
        match v {
            Value::Table(t) => leaves(&key, t, out),
            v => out.push((key, v.clone())),
        }
    }
}

fn sets(t: &Table) -> Vec<String> {
    let mut all = vec![];
    leaves("", t, &mut all);
    all.into_iter().map(|(k, v)| format!("{k}={v}")).collect()
}

type Grid = Vec<(String, Vec<Value>)>;

fn grid(name: &str, t: &Table) -> anyhow::Result<Grid> {
    let mut all = vec![];
    leaves("", t, &mut all);
    let axis = |(k, v): (String, Value)| match v {
        Value::Array(values) if !values.is_empty() => Ok((k, values)),
        other => bail!("{name}: grid {k} = {other}: expected a list of the values to try, such as [1, 2, 4]"),
    };
    all.into_iter().map(axis).collect()
}

/// Every choice of one value a key; the last key varies fastest.
fn points(grid: &Grid) -> Vec<Vec<(String, Value)>> {
    grid.iter().fold(vec![vec![]], |points, (k, values)| {
        let with = |p: &Vec<(String, Value)>, v: &Value| {
            let mut p = p.clone();
            p.push((k.clone(), v.clone()));
            p
        };
        points.iter().flat_map(|p| values.iter().map(move |v| with(p, v))).collect()
    })
}

/// The last word of a key, where no other key of the grid ends in the same.
fn short<'a>(key: &'a str, grid: &Grid) -> &'a str {
    let last = |k: &'a str| k.rsplit('.').next().unwrap_or(k);
    let same = grid.iter().filter(|(k, _)| k.rsplit('.').next() == key.rsplit('.').next()).count();
    if same > 1 { key } else { last(key) }
}

/// A value in a name: of modules their kinds.
fn show(v: &Value) -> String {
    let kind = |v: &Value| v.get("kind").and_then(|k| k.as_str()).map(str::to_owned);
    match v {
        Value::String(s) => s.clone(),
        Value::Array(items) => {
            items.iter().map(|i| kind(i).unwrap_or_else(|| show(i))).collect::<Vec<_>>().join("+")
        }
        v => v.to_string(),
    }
}

/// A name that can be a folder's anywhere.
fn clean(name: &str) -> String {
    let keep = |c: char| if c.is_alphanumeric() || "._=+,- ".contains(c) { c } else { '_' };
    let name: String = name.trim().chars().map(keep).collect();
    // no hidden folder, and none of those with a meaning
    if name.starts_with('.') { format!("_{name}") } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> anyhow::Result<SweepFile> {
        SweepFile::parse("s.toml", Path::new("dir"), text)
    }

    fn names(f: &SweepFile) -> Vec<&str> {
        f.variants.iter().map(|v| v.name.as_str()).collect()
    }

    #[test]
    fn a_grid_is_every_choice() {
        let f = parse(
            "train = 'a.tsv'\nseeds = 2\nset = { 'model.width' = 8 }\n[grid]\n'model.layers' = [1, 2]\nmodel.residual.mode = ['hc', 'mhc']",
        )
        .unwrap();
        assert_eq!(
            names(&f),
            ["layers=1,mode=hc", "layers=1,mode=mhc", "layers=2,mode=hc", "layers=2,mode=mhc"]
        );
        assert_eq!(f.variants[1].sets, ["model.width=8", "model.layers=1", r#"model.residual.mode="mhc""#]);
        assert_eq!((f.seeds, f.train), (vec![1, 2], vec!["dir/a.tsv".into()]));
    }

    /// Paths are relative to the file's folder, other words are what they are.
    #[test]
    fn data_are_said_by_keys() {
        let f = parse(
            "train = ['a.csv', '/b/*.csv']\nsplit = '0.8,0.2'\nsplit_by = 'time:day'\nschema = 's.toml'\ncache = 'rows'",
        )
        .unwrap();
        assert_eq!(f.train, ["dir/a.csv", "/b/*.csv"]);
        assert_eq!((f.split.as_deref(), f.split_by.as_deref()), (Some("0.8,0.2"), Some("time:day")));
        assert_eq!((f.schema, f.cache), (Some("dir/s.toml".into()), Some("dir/rows".into())));
        assert_eq!(parse("cache = 'memory'").unwrap().cache, Some("memory".into()));
        assert_eq!(parse("split-by = 'random'").unwrap().split_by.as_deref(), Some("random"));
    }

    #[test]
    fn a_list_has_its_names_and_may_have_a_grid() {
        let f = parse(
            "seeds = [4, 9]\n[[run]]\nname = 'pair/a'\nset = { 'model.modules' = [{kind='fm'}, {kind='linear'}] }\n[[run]]\nname='b'\n[grid]\n'model.layers'=[1,2]",
        )
        .unwrap();
        assert_eq!(names(&f), ["pair_a,layers=1", "pair_a,layers=2", "b,layers=1", "b,layers=2"]);
        assert_eq!(f.variants[0].sets[0], r#"model.modules=[{ kind = "fm" }, { kind = "linear" }]"#);
        assert_eq!(names(&parse("").unwrap()), ["base"]);
        let modules =
            parse("[grid]\n'model.modules' = [[{kind='fm'}], [{kind='fm'}, {kind='linear'}]]").unwrap();
        assert_eq!(names(&modules), ["modules=fm", "modules=fm+linear"]);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, part) in [
            ("train = 'a'\nsedes = 3", "s.toml:2: unknown field `sedes`"),
            ("train = 3", "s.toml:1: expected a file or a list of files"),
            ("seeds = []", "expected at least one"),
            ("seeds = [1, 1]", "none of them twice"),
            ("seeds = 'x'", "s.toml:1: expected a number of seeds"),
            ("[grid]\n'model.layers' = 3", "grid model.layers = 3: expected a list"),
            ("[grid]\n'model.layers' = []", "expected a list"),
            ("[[run]]\nset = {}", "s.toml:1: missing field `name`"),
            ("[[run]]\nname='a'\n[[run]]\nname='a'", "two runs would be called \"a\""),
            ("seeds = 100000", "100000 runs"),
            ("x = ", "s.toml:1:"),
        ] {
            let e = parse(text).expect_err(text).to_string();
            assert!(e.contains(part) && !e.contains('\n'), "{text:?}: {e}");
        }
    }
}
