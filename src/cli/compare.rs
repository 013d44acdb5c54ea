//! `birkhoff compare`: runs side by side.

use super::args::CompareArgs;
use super::output;
use super::table::{Table, short};
use crate::diagnose::ModelCard;
use crate::text::group;
use crate::train::history::History;
use crate::train::run::{MODEL, RunFolder};
use crate::train::trainer::Event;
use anyhow::bail;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// What a run came to.
#[derive(Clone, Debug, Serialize)]
pub struct RunResult {
    /// How the table calls it.
    pub run: String,
    /// Its folder.
    pub path: PathBuf,
    /// Whether it came to its end; else the figures are those of its best evaluation so far.
    pub finished: bool,
    /// Normalized entropy on the validation rows.
    pub ne: Option<f64>,
    /// Relative difference of `ne` to that of the first run, in percent.
    pub ne_difference: Option<f64>,
    /// Area under the ROC curve.
    pub auc: Option<f64>,
    /// Mean cross-entropy in nats.
    pub logloss: Option<f64>,
    /// Σ p̂ / Σ y.
    pub calibration: Option<f64>,
    /// Trainable numbers.
    pub parameters: Option<u64>,
    /// FLOPs of scoring one example.
    pub flops_per_example: Option<f64>,
    /// FLOPs of a training step for each of its examples.
    pub training_flops_per_example: Option<f64>,
    /// Training rows a second.
    pub rows_per_s: Option<f64>,
    /// Steps done.
    pub steps: Option<u64>,
    /// Step of the best weights.
    pub best_step: Option<u64>,
    /// Ranks that it was trained on, last.
    pub ranks: u64,
    /// Where it ran.
    pub device: Option<String>,
    /// The whole configuration by dotted key.
    #[serde(skip)]
    pub config: Map<String, Value>,
}

/// Reads what a run came to. `Err` says what is wrong with it.
pub fn read(path: &Path) -> anyhow::Result<RunResult> {
    let folder = RunFolder::open(path)?;
    let config = flat(&serde_json::to_value(folder.read_config()?)?);
    let card = std::fs::read(path.join(MODEL)).ok();
    let card: Option<ModelCard> = card.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut r = RunResult {
        run: path.display().to_string(),
        path: path.to_owned(),
        finished: folder.is_finished(),
        ne: None,
        ne_difference: None,
        auc: None,
        logloss: None,
        calibration: None,
        parameters: card.as_ref().map(|c| c.parameters as u64),
        flops_per_example: card.as_ref().map(|c| {
            let forward = c.parts.iter().filter(|p| p.name != "update" && p.name != "loss");
            forward.map(|p| p.flops_forward).sum::<f64>() / c.batch.max(1) as f64
        }),
        training_flops_per_example: card.as_ref().map(|c| c.flops_per_step / c.batch.max(1) as f64),
        rows_per_s: None,
        steps: None,
        best_step: None,
        ranks: 1,
        device: card.map(|c| c.device).filter(|d| !d.is_empty()),
        config,
    };
    if r.finished {
        let s = folder.read_summary()?;
        let number = |key: &str| s[key].as_f64();
        (r.ne, r.auc) = (number("ne"), number("auc"));
        (r.logloss, r.calibration) = (number("logloss"), number("calibration"));
        r.rows_per_s = number("rows_per_s");
        (r.steps, r.best_step) = (s["steps"].as_u64(), s["best_step"].as_u64());
        r.ranks = s["ranks"]["world"].as_u64().unwrap_or(1);
        r.parameters = s["parameters"].as_u64().or(r.parameters);
        r.device = s["device"].as_str().map(str::to_owned).or(r.device);
        return Ok(r);
    }
    for e in History::read(path)?.events {
        match e {
            Event::Step { step, rows_per_s, .. } => (r.steps, r.rows_per_s) = (Some(step), Some(rows_per_s)),
            Event::Eval { step, metrics: m, best: true, .. } => {
                (r.ne, r.auc, r.calibration) = (m.ne, m.auc, m.calibration);
                (r.logloss, r.best_step) = (Some(m.logloss), Some(step));
            }
            Event::Ranks(record) => r.ranks = record.ranks.len() as u64,
            _ => {}
        }
    }
    Ok(r)
}

/// A table of tables as one, by dotted key; lists stay whole.
pub fn flat(v: &Value) -> Map<String, Value> {
    fn visit(prefix: &str, v: &Value, out: &mut Map<String, Value>) {
        let Value::Object(table) = v else {
            out.insert(prefix.to_owned(), v.clone());
            return;
        };
        for (k, v) in table {
            let key = if prefix.is_empty() { k.clone() } else { format!("{prefix}.{k}") };
            visit(&key, v, out);
        }
    }
    let mut out = Map::new();
    visit("", v, &mut out);
    out
}

/// The keys whose values are not the same in all runs, in the order of the configuration.
fn differing(runs: &[RunResult]) -> Vec<String> {
    let mut keys: Vec<&String> = vec![];
    for r in runs {
        keys.extend(r.config.keys().filter(|k| !keys.contains(k)).collect::<Vec<_>>());
    }
    let differs = |k: &&String| runs.iter().any(|r| r.config.get(*k) != runs[0].config.get(*k));
    keys.into_iter().filter(differs).cloned().collect()
}

/// A value of the configuration in few characters: of modules their kinds alone.
fn brief(v: Option<&Value>) -> String {
    match v {
        None => "–".into(),
        Some(Value::String(s)) => s.clone(),
        Some(Value::Array(items)) if items.iter().all(|i| i.get("kind").is_some()) && !items.is_empty() => {
            items.iter().map(|i| i["kind"].as_str().unwrap_or("?")).collect::<Vec<_>>().join("+")
        }
        Some(v) => v.to_string(),
    }
}

/// A key's values, one a run: brief, unless that makes different values look the same.
fn cells(runs: &[RunResult], key: &str) -> Vec<String> {
    let values: Vec<Option<&Value>> = runs.iter().map(|r| r.config.get(key)).collect();
    let clash = values.iter().any(|a| values.iter().any(|b| a != b && brief(*a) == brief(*b)));
    let full = |v: &Option<&Value>| v.map_or("–".into(), |v| v.to_string().replace('"', ""));
    values.iter().map(|v| if clash { full(v) } else { brief(*v) }).collect()
}

/// The runs that a path stands for: itself, or the runs in a folder and its folders.
fn runs_in(path: &Path) -> Vec<PathBuf> {
    fn visit(path: &Path, depth: usize, out: &mut Vec<PathBuf>) {
        if path.join("config.toml").is_file() {
            out.push(path.to_owned());
            return;
        }
        let Ok(entries) = std::fs::read_dir(path) else { return };
        let mut inside: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
        inside.sort();
        if depth > 0 {
            inside.iter().for_each(|p| visit(p, depth - 1, out));
        }
    }
    let mut out = vec![];
    visit(path, 3, &mut out);
    // what holds no run is to be named as broken
    if out.is_empty() { vec![path.to_owned()] } else { out }
}

/// Calls each run by the last parts of its path, as many as tell them apart.
fn name(runs: &mut [RunResult]) {
    let parts: Vec<Vec<String>> = runs
        .iter()
        .map(|r| {
            let path = r.path.canonicalize().unwrap_or_else(|_| r.path.clone());
            path.components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect()
        })
        .collect();
    let deepest = parts.iter().map(Vec::len).max().unwrap_or(0);
    for n in 1..=deepest {
        let names: Vec<String> = parts.iter().map(|p| p[p.len().saturating_sub(n)..].join("/")).collect();
        let mut sorted = names.clone();
        sorted.sort();
        sorted.dedup();
        if sorted.len() == names.len() || n == deepest {
            runs.iter_mut().zip(names).for_each(|(r, name)| r.run = name);
            return;
        }
    }
}

/// Runs the subcommand.
pub fn run(args: &CompareArgs) -> anyhow::Result<()> {
    let mut runs = vec![];
    let mut broken: Vec<(PathBuf, String)> = vec![];
    for path in args.runs.iter().flat_map(|p| runs_in(p)) {
        match read(&path) {
            Ok(r) => runs.push(r),
            Err(e) => broken.push((path, crate::text::error_line(&e))),
        }
    }
    for (_, problem) in &broken {
        eprintln!("left out: {problem}");
    }
    let Some(first) = runs.first() else {
        bail!("none of the {} runs can be read; the lines above say why", broken.len());
    };
    let base = first.ne;
    for r in &mut runs {
        r.ne_difference = base.zip(r.ne).map(|(base, ne)| 100.0 * (ne - base) / base);
    }
    name(&mut runs);
    let keys = differing(&runs);
    if let Some(key) = &args.sort {
        sort(&mut runs, key, &keys)?;
    }
    let table = table(&runs, &keys);
    if let Some(csv) = &args.csv {
        let files: Vec<&Path> = runs.iter().map(|r| r.path.as_path()).collect();
        output::not_an_input(csv, &files)?;
        self::csv(&runs, &keys).write_csv(csv)?;
    }
    if args.json {
        let runs = runs.iter().map(|r| {
            let mut v = serde_json::to_value(r)?;
            let config: Map<String, Value> =
                keys.iter().map(|k| (k.clone(), r.config.get(k).cloned().unwrap_or(Value::Null))).collect();
            v["config"] = Value::Object(config);
            Ok(v)
        });
        let runs = runs.collect::<anyhow::Result<Vec<_>>>()?;
        let broken: Vec<Value> = broken.iter().map(|(p, e)| json!({"path": p, "error": e})).collect();
        return output::json(&json!({"runs": runs, "differs": keys, "broken": broken}));
    }
    table.print()
}

/// Figures that `--sort` knows: name, whether more is better, and the figure.
type Figure = (&'static str, bool, fn(&RunResult) -> Option<f64>);
const FIGURES: [Figure; 10] = [
    ("ne", false, |r| r.ne),
    ("auc", true, |r| r.auc),
    ("logloss", false, |r| r.logloss),
    ("calibration", false, |r| r.calibration),
    ("parameters", false, |r| r.parameters.map(|x| x as f64)),
    ("flops", false, |r| r.flops_per_example),
    ("rows_per_s", true, |r| r.rows_per_s),
    ("steps", false, |r| r.steps.map(|x| x as f64)),
    ("best_step", false, |r| r.best_step.map(|x| x as f64)),
    ("ranks", false, |r| Some(r.ranks as f64)),
];

fn sort(runs: &mut [RunResult], key: &str, differs: &[String]) -> anyhow::Result<()> {
    let numbers = |a: Option<f64>, b: Option<f64>, more: bool| match (a, b) {
        (Some(a), Some(b)) => {
            if more {
                b.total_cmp(&a)
            } else {
                a.total_cmp(&b)
            }
        }
        // what has none comes last
        (a, b) => b.is_some().cmp(&a.is_some()),
    };
    if let Some((_, more, figure)) = FIGURES.iter().find(|f| f.0 == key) {
        runs.sort_by(|a, b| numbers(figure(a), figure(b), *more));
    } else if key == "run" {
        runs.sort_by(|a, b| a.run.cmp(&b.run));
    } else if runs.iter().any(|r| r.config.contains_key(key)) {
        runs.sort_by(|a, b| {
            let (a, b) = (a.config.get(key), b.config.get(key));
            match (a.and_then(Value::as_f64), b.and_then(Value::as_f64)) {
                (None, None) => brief(a).cmp(&brief(b)),
                (a, b) => numbers(a, b, false),
            }
        });
    } else {
        let known: Vec<&str> = FIGURES.iter().map(|f| f.0).collect();
        let keys = if differs.is_empty() { String::new() } else { format!(", {}", differs.join(", ")) };
        bail!("--sort {key}: no such figure or key; it takes run, {}{keys}", known.join(", "));
    }
    Ok(())
}

fn table(runs: &[RunResult], keys: &[String]) -> Table {
    let last = |k: &String| k.rsplit('.').next().unwrap_or(k).to_owned();
    // the last part of a key is enough where no other ends the same
    let title =
        |k: &String| if keys.iter().filter(|o| last(o) == last(k)).count() > 1 { k.clone() } else { last(k) };
    let mut head = vec!["run".to_owned()];
    head.extend(keys.iter().map(title));
    let several = runs.iter().any(|r| r.ranks != runs[0].ranks);
    head.extend(several.then(|| "ranks".into()));
    head.extend(
        ["NE", "ΔNE %", "AUC", "log loss", "params", "FLOPs/ex.", "rows/s", "steps", "device"]
            .map(String::from),
    );
    let mut t = Table::new(head);
    let show = |v: Option<f64>, digits: usize| v.map_or("–".into(), |v| format!("{v:.digits$}"));
    let columns: Vec<Vec<String>> = keys.iter().map(|k| cells(runs, k)).collect();
    for (i, r) in runs.iter().enumerate() {
        let mut row = vec![format!("{}{}", r.run, if r.finished { "" } else { " (unfinished)" })];
        row.extend(columns.iter().map(|c| c[i].clone()));
        row.extend(several.then(|| r.ranks.to_string()));
        row.extend([
            show(r.ne, 5),
            r.ne_difference.map_or("–".into(), |d| format!("{d:+.3}")),
            show(r.auc, 5),
            show(r.logloss, 5),
            r.parameters.map_or("–".into(), |p| short(p as f64)),
            r.flops_per_example.map_or("–".into(), short),
            r.rows_per_s.map_or("–".into(), |v| group(v as u64)),
            r.steps.map_or("–".into(), |s| s.to_string()),
            r.device.clone().unwrap_or("–".into()),
        ]);
        t.rows.push(row);
    }
    t
}

/// All figures in full.
fn csv(runs: &[RunResult], keys: &[String]) -> Table {
    let figures: Vec<&str> = FIGURES.iter().map(|f| f.0).collect();
    let head = ["run", "path", "finished", "ne_difference_percent", "device"].into_iter().chain(figures);
    let mut t = Table::new(head.map(String::from).chain(keys.iter().cloned()));
    let show = |v: Option<f64>| v.map_or(String::new(), |v| v.to_string());
    for r in runs {
        let mut row = vec![
            r.run.clone(),
            r.path.display().to_string(),
            r.finished.to_string(),
            show(r.ne_difference),
            r.device.clone().unwrap_or_default(),
        ];
        row.extend(FIGURES.iter().map(|f| show((f.2)(r))));
        let plain = |v: Option<&Value>| match v {
            None => String::new(),
            Some(Value::String(s)) => s.clone(),
            Some(v) => v.to_string(),
        };
        row.extend(keys.iter().map(|k| plain(r.config.get(k))));
        t.rows.push(row);
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Config;

    fn result(path: &str, sets: &[&str], ne: Option<f64>) -> RunResult {
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        let config = Config::load(None, &sets).expect("config");
        RunResult {
            run: path.into(),
            path: path.into(),
            finished: true,
            ne,
            ne_difference: None,
            auc: ne.map(|n| 1.0 - n),
            logloss: None,
            calibration: None,
            parameters: Some(7),
            flops_per_example: None,
            training_flops_per_example: None,
            rows_per_s: None,
            steps: None,
            best_step: None,
            ranks: 1,
            device: None,
            config: flat(&serde_json::to_value(config).expect("json")),
        }
    }

    #[test]
    fn only_what_differs_is_shown() {
        let runs = [
            result("a", &["model.layers=2", r#"model.modules=[{kind="fm"},{kind="linear"}]"#], Some(0.8)),
            result("b", &["model.layers=8", r#"model.layer=[{},{},{},{},{},{},{},{}]"#], None),
        ];
        assert_eq!(differing(&runs), ["model.layers", "model.modules", "model.layer"]);
        assert!(differing(&runs[..1]).is_empty());
        let t = table(&runs, &differing(&runs));
        assert_eq!(t.rows[0][..5], ["a", "2", "fm+linear", "–", "0.80000"].map(String::from));
        assert_eq!(t.rows[1][2], "attention+linear");
        assert!(!t.head.contains(&"ranks".to_owned()));
        let cross = |rank: &str| format!(r#"model.modules=[{{kind="cross",rank={rank}}}]"#);
        let runs = [result("a", &[&cross("2")], None), result("b", &[&cross("4")], None)];
        let cells = cells(&runs, "model.modules");
        assert!(cells[0] != cells[1] && cells[0].contains("rank:2"), "{cells:?}");
    }

    #[test]
    fn other_numbers_of_ranks_are_shown() {
        let mut runs = [result("a", &[], Some(0.8)), result("b", &[], Some(0.7))];
        runs[1].ranks = 4;
        let t = table(&runs, &[]);
        assert_eq!(t.head[..3], ["run", "ranks", "NE"].map(String::from));
        assert_eq!((t.rows[0][1].as_str(), t.rows[1][1].as_str()), ("1", "4"));
        sort(&mut runs, "ranks", &[]).unwrap();
        assert_eq!(csv(&runs, &[]).head.last().map(String::as_str), Some("ranks"));
    }

    #[test]
    fn sorting_knows_what_is_better() {
        let sets = |l: &str| format!("model.layers={l}");
        let mut runs = vec![
            result("a", &[&sets("10")], Some(0.8)),
            result("b", &[&sets("9")], None),
            result("c", &[&sets("2")], Some(0.7)),
        ];
        let mut order = |key: &str| {
            sort(&mut runs, key, &["model.layers".into()])
                .map(|()| runs.iter().map(|r| r.run.clone()).collect::<String>())
        };
        assert_eq!(order("ne").unwrap(), "cab");
        assert_eq!(order("auc").unwrap(), "cab", "more is better, and no figure comes last");
        assert_eq!(order("model.layers").unwrap(), "cba", "by number, not by text");
        assert_eq!(order("run").unwrap(), "abc");
        let e = order("ney").unwrap_err().to_string();
        assert!(e.contains("it takes run, ne, auc") && e.contains("model.layers"), "{e}");
    }

    #[test]
    fn names_are_as_long_as_they_must_be() {
        let mut runs = vec![result("x/a/seed-1", &[], None), result("x/b/seed-1", &[], None)];
        name(&mut runs);
        assert_eq!((runs[0].run.as_str(), runs[1].run.as_str()), ("a/seed-1", "b/seed-1"));
    }
}
