//! Parsing and encoding Criteo's format on one thread, beside the `csv` crate's bare reading of the same bytes.
//!
//!     cargo bench --bench parse

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use birkhoff::data::encoder::FittedEncoder;
use birkhoff::data::input::Place;
use birkhoff::data::reader::{ReadOptions, Source, fit};
use birkhoff::data::schema::{Encoding, Schema, Transform};
use birkhoff::data::synth::{DEFAULT_WORLD, Synth};

const ROWS: u64 = 200_000;
const ROUNDS: usize = 7;

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    // one thread: this program's pool has a single worker
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("the pool is not built yet");
    let mut synth = Synth::new(DEFAULT_WORLD, 1);
    let mut bytes = Vec::new();
    for _ in 0..ROWS {
        synth.next_row().write_to(&mut bytes).expect("memory");
    }
    let source =
        Source::criteo(Place::Bytes("bench.tsv".into(), bytes.clone().into()), ReadOptions::default());
    println!("{ROWS} rows, {:.1} MB", bytes.len() as f64 / 1e6);
    let hash = Encoding::Hash { buckets: 100_000 };
    let encoders: Vec<(&str, FittedEncoder)> = [
        ("vocabulary", Transform::Log, Encoding::Vocabulary { min_count: 1, max_size: None }),
        ("hash", Transform::Log, hash),
        ("hash, logarithms standardised", Transform::LOG_STANDARDIZE, hash),
    ]
    .into_iter()
    .map(|(name, t, e)| (name, fit(&source, &Schema::criteo(t, true, e)).expect(name).0))
    .collect();
    let path = Path::new("bench.tsv");
    let values: u64 = encoders[0].1.table_rows().iter().map(|&r| u64::from(r)).sum();
    println!("{values} values in the vocabularies");
    let (mut bare, mut ours) = (vec![], vec![vec![]; encoders.len()]);
    // turn by turn, so that a busy machine slows all alike
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let mut reader = csv::ReaderBuilder::new()
            .has_headers(false)
            .delimiter(b'\t')
            .quoting(false)
            .from_reader(&bytes[..]);
        let mut record = csv::ByteRecord::new();
        let mut fields = 0;
        while reader.read_byte_record(&mut record).expect("good rows") {
            fields += black_box(&record).len();
        }
        assert_eq!(fields as u64, 40 * ROWS, "{}", path.display());
        bare.push(begin.elapsed().as_secs_f64());
        for ((_, encoder), times) in encoders.iter().zip(&mut ours) {
            let begin = Instant::now();
            let mut reader = source.open(&encoder.schema).expect("opens");
            let (mut seen, mut chunks) = (0, vec![]);
            while reader.next_encoded(encoder, &mut chunks).expect("good rows") {
                seen += black_box(&chunks).iter().map(|c| c.0.len()).sum::<usize>();
            }
            assert_eq!(seen as u64, ROWS);
            times.push(begin.elapsed().as_secs_f64());
        }
    }
    let bare = median(bare);
    let rate = |t: f64| bytes.len() as f64 / 1e6 / t;
    println!("csv crate, ByteRecord        {:7.1} MB/s", rate(bare));
    for ((name, _), times) in encoders.iter().zip(ours) {
        let t = median(times);
        println!("parsed and encoded, {name:<29} {:5.1} MB/s = {:.2} of it", rate(t), bare / t);
    }
}
