//! `birkhoff plan`: where embedding tables go on several ranks, and what that costs.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde::Serialize;

use super::output;
use super::run_args::{PlanArgs, SplitWord};
use super::table::Table as Printed;
use crate::data::FittedEncoder;
use crate::data::reader::{Labels, Source, fit};
use crate::data::schema::{Encoding, Schema};
use crate::model::config::Config;
use crate::parallel::cost::{Cluster, CostModel, Evaluation, RankCost};
use crate::parallel::placement::{Placement, Shard, Table};
use crate::parallel::planner::{Cuts, PlanError, plan};
use crate::parallel::tables;
use crate::text::group;
use crate::text::human_bytes;
use crate::train::run::{CONFIG, RunError, VOCAB, write_atomic};

/// Rows that are looked at to measure how often ids repeat.
const MEASURED: usize = 1 << 18;

/// Tables that a rank's line names.
const NAMED: usize = 5;

#[derive(Serialize)]
struct TableReport<'a> {
    #[serde(flatten)]
    table: &'a Table,
    bytes: u64,
    shards: usize,
}

#[derive(Serialize)]
struct ShardReport<'a> {
    table: &'a str,
    rows: [u64; 2],
    columns: [u32; 2],
    bytes: u64,
}

#[derive(Serialize)]
struct RankReport<'a> {
    #[serde(flatten)]
    cost: &'a RankCost,
    seconds: f64,
    holds: Vec<ShardReport<'a>>,
}

#[derive(Serialize)]
struct Report<'a> {
    cluster: &'a Cluster,
    batch: usize,
    tables: Vec<TableReport<'a>>,
    bytes: u64,
    ranks: Vec<RankReport<'a>>,
    max_s: f64,
    mean_s: f64,
    imbalance: f64,
}

/// Runs the subcommand.
pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let run = args.model.as_deref().filter(|m| m.is_dir());
    let cfg = config(args, run)?;
    if let Some(out) = &args.out {
        let files = [&args.model, &args.cluster, &args.schema, &args.plan];
        let inputs = files.into_iter().flatten().chain(&args.train).map(|f| f.as_path());
        output::not_an_input(out, &inputs.collect::<Vec<_>>())?;
    }
    let tables = find_tables(args, &cfg, run)?;
    ensure!(!tables.is_empty(), "the configuration has no categorical columns: there are no tables to place");
    let given = args.plan.as_deref().map(|file| {
        let placement = Placement::from_toml(&file.display().to_string(), &read(file)?, &tables)?;
        if let Some(world) = args.world
            && world as usize != placement.world()
        {
            bail!("{}: world = {}, but --world {world}", file.display(), placement.world());
        }
        Ok(placement)
    });
    let given = given.transpose()?;
    let cluster = cluster(args, given.as_ref().map(Placement::world))?;
    let placement = match &given {
        Some(placement) => placement.clone(),
        None => make(args, &tables, &cluster, &cfg)?,
    };
    for t in cut_accumulators(&tables, &placement) {
        eprintln!(
            "note: {t} is cut by columns, and row-wise Adagrad's accumulator is a mean over all columns: each part has \
             its own, and learns otherwise than the whole table"
        );
    }
    let evaluation = CostModel::new(&tables, &cluster, cfg.train.batch as u64).evaluate(&placement);
    if let Some(out) = &args.out {
        write_atomic(out, |w| w.write_all(placement.to_toml(&tables).as_bytes()))?;
    }
    if args.json {
        output::json(&report(&cfg, &tables, &cluster, &placement, &evaluation))?;
    } else {
        print(args, &cfg, &tables, &cluster, &placement, &evaluation)?;
    }
    // only an edited plan can hold too much
    if let (Some(file), Some(memory)) = (&args.plan, cluster.memory)
        && let Some(r) = evaluation.ranks.iter().max_by_key(|r| r.bytes).filter(|r| r.bytes > memory)
    {
        bail!(
            "{}: rank {} holds {}, {} more than its memory; move shards to other ranks, or plan anew without --plan",
            file.display(),
            r.rank,
            human_bytes(r.bytes),
            human_bytes(r.bytes - memory)
        );
    }
    Ok(())
}

fn read(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file).with_context(|| format!("{}: cannot read", file.display()))
}

/// The configuration: a file's, or that of a run.
fn config(args: &PlanArgs, run: Option<&Path>) -> anyhow::Result<Config> {
    if let Some(run) = run {
        let name = run.display().to_string();
        ensure!(run.join(CONFIG).is_file(), RunError::NoConfig(name));
        ensure!(args.schema.is_none(), "{name}: a run has its columns already; leave out --schema");
    }
    let file = run.map(|r| r.join(CONFIG)).or_else(|| args.model.clone());
    let mut cfg = Config::load(file.as_deref(), &args.sets)?;
    if let Some(schema) = &args.schema {
        cfg.data = Config::load(Some(schema), &super::args::data_sets(&args.sets))?.data;
    }
    cfg.train.batch = args.batch.unwrap_or(cfg.train.batch);
    cfg.validate()?;
    Ok(cfg)
}

fn cluster(args: &PlanArgs, planned: Option<usize>) -> anyhow::Result<Cluster> {
    let world = planned.or(args.world.map(|w| w as usize));
    let mut cluster = match (&args.cluster, world) {
        (Some(file), _) => Cluster::from_toml(&file.display().to_string(), &read(file)?, world)?,
        (None, Some(world)) => Cluster::new(world),
        (None, None) => bail!("for how many ranks? give --world N, or --cluster FILE with ranks = N"),
    };
    cluster.memory = args.memory.or(cluster.memory);
    Ok(cluster)
}

/// A plan; where there is none, with all that would make one.
fn make(args: &PlanArgs, tables: &[Table], cluster: &Cluster, cfg: &Config) -> anyhow::Result<Placement> {
    let cuts = match args.split {
        SplitWord::Auto => Cuts::Auto,
        SplitWord::Rows => Cuts::Rows,
        SplitWord::Columns => Cuts::Columns,
    };
    let batch = cfg.train.batch as u64;
    plan(tables, cluster, batch, cuts).map_err(|e| {
        let lean: Vec<Table> =
            tables.iter().map(|t| Table { row_state: 1, value_state: 0, ..t.clone() }).collect();
        let adam = tables.iter().any(|t| t.value_state > 0);
        match e {
            PlanError::TooLarge(e) if adam && plan(&lean, cluster, batch, cuts).is_ok() => anyhow::anyhow!(
                "{e}, or --set train.embedding=adagrad, which keeps one number a row in place of Adam's two a value"
            ),
            e => e.into(),
        }
    })
}

/// The tables with their sizes, from wherever these are known.
fn find_tables(args: &PlanArgs, cfg: &Config, run: Option<&Path>) -> anyhow::Result<Vec<Table>> {
    let schema = crate::train::schema::schema(&cfg.data)?;
    let mut wanted = rows_option(args, &schema)?;
    let encoder = match run {
        Some(run) => {
            let vocab = run.join(VOCAB);
            ensure!(
                vocab.is_file(),
                "{}: not there: the run did not come to training; give its configuration and --train",
                vocab.display()
            );
            let encoder = FittedEncoder::load(&vocab)?;
            encoder.check_schema(&vocab, &schema)?;
            Some(encoder)
        }
        None => None,
    };
    let mut rows = vec![];
    let (mut encoder, source) = match (encoder, args.train.is_empty()) {
        (encoder, true) => (encoder, None),
        (encoder, false) => {
            let (places, spool) = super::data::places(&args.train)?;
            let source = super::data::source(places, &cfg.data, &schema, args.on_bad_row, Labels::Required)?;
            (encoder, Some((source, spool)))
        }
    };
    if let (None, Some((source, _))) = (&encoder, &source) {
        let bar = super::train::spinner(false, "counting values");
        let fitted = fit(source, &schema);
        bar.finish_and_clear();
        let (fitted, skipped) = fitted?;
        super::train::report_skipped(Path::new(&source.name()), &skipped);
        encoder = Some(fitted);
    }
    let mut unknown = vec![];
    for (j, (c, owner)) in schema.categorical.iter().zip(schema.owners()).enumerate() {
        let fitted = encoder.as_ref().map(|e| u64::from(e.table_rows()[j]));
        let n = match (wanted.remove(&c.name), fitted, c.encoding) {
            (Some(n), _, _) | (None, Some(n), _) => n,
            (_, _, Encoding::Hash { buckets }) => 2 + u64::from(buckets),
            (_, _, Encoding::Vocabulary { max_size: Some(n), .. }) => 2 + u64::from(n),
            _ => {
                if owner == j {
                    unknown.push(c.name.as_str());
                }
                0
            }
        };
        rows.push(n);
    }
    if let Some(first) = unknown.first() {
        let more = if unknown.len() > 1 { format!(" and {} more", unknown.len() - 1) } else { String::new() };
        bail!(
            "how many rows the tables of {first}{more} have is not in the configuration; give --train FILE to count \
             values, a run folder in place of the configuration, or --rows {first}=N"
        );
    }
    let of = encoder.as_ref().map_or(&schema, |e| &e.schema);
    let mut found = tables::tables(of, &rows, cfg);
    if let (Some(encoder), Some((source, _))) = (&encoder, &source) {
        measure(&mut found, encoder, source, cfg.train.batch)?;
    }
    Ok(found)
}

/// `--rows COLUMN=N`, by column.
fn rows_option(args: &PlanArgs, schema: &Schema) -> anyhow::Result<HashMap<String, u64>> {
    let mut wanted = HashMap::new();
    for text in &args.rows {
        let Some((name, n)) = text.rsplit_once('=') else {
            bail!("--rows {text}: expected COLUMN=N, such as user_id=1000000");
        };
        let n = n.replace('_', "").parse().ok().filter(|n| (1..=u64::from(u32::MAX)).contains(n));
        let Some(n) = n else { bail!("--rows {text}: expected 1 to {} rows", group(u64::from(u32::MAX))) };
        match schema.categorical.iter().find(|c| c.name == name) {
            None => bail!("--rows {text}: there is no categorical column {name}"),
            Some(c) => {
                if let Some(owner) = &c.share {
                    bail!("--rows {text}: {name} uses the table of {owner}; give the rows of that");
                }
            }
        }
        wanted.insert(name.to_owned(), n);
    }
    Ok(wanted)
}

/// Looks at the first rows: how many ids an example has, and how often they repeat.
fn measure(
    found: &mut [Table],
    encoder: &FittedEncoder,
    source: &Source,
    batch: usize,
) -> anyhow::Result<()> {
    let bar = super::train::spinner(false, "measuring how often values repeat");
    let mut reader = source.open(&encoder.schema)?;
    let mut rows = encoder.empty_rows();
    while rows.len() < MEASURED.max(batch) && reader.encode_more(encoder, &mut rows)? {}
    bar.finish_and_clear();
    if rows.len() < batch {
        eprintln!(
            "note: {}: fewer rows than a batch of {}: how often values repeat is not known, all are taken for different",
            source.name(),
            group(batch as u64)
        );
    }
    tables::measure(found, &encoder.schema, &rows, batch);
    Ok(())
}

/// Tables with state of whole rows that are cut by columns.
fn cut_accumulators<'a>(tables: &'a [Table], placement: &Placement) -> Vec<&'a str> {
    let cut = |(i, t): &(usize, &Table)| {
        t.row_state > 0 && placement.shards_of_table(*i).iter().any(|s| s.columns != (0..t.width))
    };
    tables.iter().enumerate().filter(cut).map(|(_, t)| t.name.as_str()).collect()
}

fn report<'a>(
    cfg: &Config,
    tables: &'a [Table],
    cluster: &'a Cluster,
    placement: &Placement,
    e: &'a Evaluation,
) -> Report<'a> {
    let shard = |s: &Shard| ShardReport {
        table: &tables[s.table].name,
        rows: [s.rows.start, s.rows.end],
        columns: [s.columns.start, s.columns.end],
        bytes: s.bytes(tables),
    };
    let rank = |cost: &'a RankCost| RankReport {
        cost,
        seconds: cost.seconds(),
        holds: placement.shards_of(cost.rank).map(shard).collect(),
    };
    Report {
        cluster,
        batch: cfg.train.batch,
        tables: tables
            .iter()
            .enumerate()
            .map(|(i, table)| TableReport {
                table,
                bytes: table.bytes(),
                shards: placement.shards_of_table(i).len(),
            })
            .collect(),
        bytes: tables.iter().map(Table::bytes).sum(),
        ranks: e.ranks.iter().map(rank).collect(),
        max_s: e.max_s,
        mean_s: e.mean_s,
        imbalance: e.imbalance,
    }
}

/// A shard in a few words: `user`, `user[0..500]`, `user[.., 0..8]`, `user[0..500, 0..8]`.
fn name_of(s: &Shard, tables: &[Table]) -> String {
    let t = &tables[s.table];
    let rows = (s.rows != (0..t.rows)).then(|| format!("{}..{}", s.rows.start, s.rows.end));
    let columns = (s.columns != (0..t.width)).then(|| format!("{}..{}", s.columns.start, s.columns.end));
    match (rows, columns) {
        (None, None) => t.name.clone(),
        (Some(r), None) => format!("{}[{r}]", t.name),
        (r, Some(c)) => format!("{}[{}, {c}]", t.name, r.as_deref().unwrap_or("..")),
    }
}

fn print(
    args: &PlanArgs,
    cfg: &Config,
    tables: &[Table],
    cluster: &Cluster,
    placement: &Placement,
    e: &Evaluation,
) -> anyhow::Result<()> {
    let hosts = cluster.ranks > cluster.ranks_per_host;
    let mut head = vec!["rank"];
    head.extend(hosts.then_some("host"));
    head.push("MiB");
    head.extend(cluster.memory.map(|_| "of memory"));
    head.extend(["lookup ms", "comm. ms", "sum ms", "shards", "tables, the largest first"]);
    let mut out = Printed::new(head);
    let ms = |s: f64| format!("{:.3}", 1e3 * s);
    for r in &e.ranks {
        let mut row = vec![r.rank.to_string()];
        row.extend(hosts.then(|| r.host.to_string()));
        row.push(format!("{:.1}", r.bytes as f64 / f64::from(1 << 20)));
        row.extend(cluster.memory.map(|m| format!("{:.0} %", 100.0 * r.bytes as f64 / m as f64)));
        row.extend([ms(r.lookup_s), ms(r.communication_s), ms(r.seconds()), r.shards.to_string()]);
        let mut shards: Vec<&Shard> = placement.shards_of(r.rank).collect();
        shards.sort_by_key(|s| std::cmp::Reverse(s.bytes(tables)));
        let mut names: Vec<String> = shards.iter().take(NAMED).map(|s| name_of(s, tables)).collect();
        if shards.len() > NAMED {
            names.push(format!("{} more", shards.len() - NAMED));
        }
        row.push(names.join(", "));
        out.rows.push(row);
    }
    out.print()?;
    output::line("")?;
    let line = |k: &str, v: String| output::line(&format!("{k:<14} {v}"));
    let cut: Vec<String> = (0..tables.len())
        .filter_map(|i| match placement.shards_of_table(i).len() {
            1 => None,
            n => Some(format!("{} in {n}", tables[i].name)),
        })
        .collect();
    let total = human_bytes(tables.iter().map(Table::bytes).sum());
    line("tables", format!("{}, {total} with optimiser state", tables.len()))?;
    line("cut", if cut.is_empty() { "none".into() } else { cut.join(", ") })?;
    line("batch", format!("{} examples a rank", group(cfg.train.batch as u64)))?;
    line(
        "imbalance",
        format!(
            "{:.3}: the slowest rank takes {} ms a step, the mean {} ms",
            e.imbalance,
            ms(e.max_s),
            ms(e.mean_s)
        ),
    )?;
    if let Some(out) = &args.out {
        line("written to", out.display().to_string())?;
    }
    Ok(())
}
