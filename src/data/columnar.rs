//! Parquet and Arrow IPC: record batches as rows.
//!
//! Whole numbers, texts, booleans, dates and dictionaries can be categories, by the text that Arrow prints of them;
//! lists of these are list columns; every number can be numeric, NaN and null being missing.

use std::io::{Read, Seek, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type};
use arrow_array::{Array, ArrayRef, Float64Array, LargeListArray, LargeStringArray, RecordBatch};
use arrow_schema::{ArrowError, DataType, Field, SchemaRef};

use super::delimited::Problems;
use super::error::{DataError, RowProblem, quoted};
use super::input::{Place, Seekable};
use super::plan::{Fields, Plan, Sink};
use super::value::Form;

/// Rows of a batch at most.
const BATCH: usize = 8192;

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, String>> + Send>;

/// A columnar file, open.
pub(crate) struct Columnar {
    /// Names of all its columns.
    pub names: Vec<String>,
    /// Which of them hold lists.
    pub lists: Vec<bool>,
    /// Names of those that hold texts.
    pub texts: Vec<String>,
    /// What those hold of which no column can be made: structures, maps, lists of lists.
    pub odd: Vec<Option<String>>,
    batches: Batches,
    /// Rows that came before.
    rows: u64,
}

impl std::fmt::Debug for Columnar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Columnar").field("names", &self.names).finish_non_exhaustive()
    }
}

/// Runs a reader of a file that may lie about itself: what its crate panics at becomes an error.
fn guarded<T>(f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| Err("its metadata contradict its data".into()))
}

impl Columnar {
    /// Opens a Parquet file; `used` says which columns are read at all.
    pub fn parquet(place: &Place, used: impl Fn(&str) -> bool) -> Result<Columnar, DataError> {
        let path = place.name();
        let fail = |e: String| broken(&path, "Parquet", &e);
        match place.seekable()? {
            Seekable::File(f) => guarded(|| Self::of_parquet(f, used)).map_err(fail),
            Seekable::Bytes(b) => guarded(|| Self::of_parquet(bytes::Bytes::from(b), used)).map_err(fail),
        }
    }

    fn of_parquet<R: parquet::file::reader::ChunkReader + 'static>(
        source: R,
        used: impl Fn(&str) -> bool,
    ) -> Result<Columnar, String> {
        use parquet::arrow::ProjectionMask;
        use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
        let builder = ParquetRecordBatchReaderBuilder::try_new(source).map_err(|e| e.to_string())?;
        let schema = builder.schema().clone();
        let wanted = schema.fields().iter().enumerate().filter(|(_, f)| used(f.name())).map(|(i, _)| i);
        let mask = ProjectionMask::roots(builder.parquet_schema(), wanted);
        let reader = builder.with_projection(mask).with_batch_size(BATCH).build();
        Ok(Self::new(schema, reader.map_err(|e| e.to_string())?))
    }

    /// Opens an Arrow IPC file or stream.
    pub fn arrow(place: &Place, stream: bool) -> Result<Columnar, DataError> {
        let path = place.name();
        let fail = |e: String| broken(&path, "Arrow IPC", &e);
        if stream {
            // streams are read from the start: what a pipe can give
            let (_, reader) = place.open(&Default::default())?;
            return guarded(|| {
                let reader = arrow_ipc::reader::StreamReader::try_new(reader, None);
                let reader = reader.map_err(|e| e.to_string())?;
                Ok(Self::new(reader.schema(), reader))
            })
            .map_err(fail);
        }
        match place.seekable()? {
            Seekable::File(f) => guarded(|| Self::of_arrow(std::io::BufReader::new(f))).map_err(fail),
            Seekable::Bytes(b) => guarded(|| Self::of_arrow(std::io::Cursor::new(b))).map_err(fail),
        }
    }

    fn of_arrow(mut source: impl Read + Seek + Send + 'static) -> Result<Columnar, String> {
        check_blocks(&mut source)?;
        let reader = arrow_ipc::reader::FileReader::try_new(source, None).map_err(|e| e.to_string())?;
        Ok(Self::new(reader.schema(), reader))
    }

    /// Batches up to the first error, a panic of `reader`'s crate included.
    fn new(
        schema: SchemaRef,
        mut reader: impl Iterator<Item = Result<RecordBatch, ArrowError>> + Send + 'static,
    ) -> Columnar {
        let mut failed = false;
        let batches: Batches = Box::new(std::iter::from_fn(move || {
            if failed {
                return None;
            }
            let item = guarded(|| reader.next().transpose().map_err(|e| e.to_string())).transpose();
            failed = matches!(item, Some(Err(_)));
            item
        }));
        let names = schema.fields().iter().map(|f| f.name().clone()).collect();
        let lists = schema.fields().iter().map(|f| is_list(f.data_type())).collect();
        let texts =
            schema.fields().iter().filter(|f| is_text(f.data_type())).map(|f| f.name().clone()).collect();
        let odd = schema
            .fields()
            .iter()
            .map(|f| is_odd(f.data_type()).then(|| f.data_type().to_string()))
            .collect();
        Columnar { names, lists, texts, odd, batches, rows: 0 }
    }

    /// The next batch, with the number of rows that came before it.
    pub fn next_batch(&mut self, path: &Path, kind: &str) -> Result<Option<(RecordBatch, u64)>, DataError> {
        let Some(batch) = self.batches.next() else { return Ok(None) };
        let batch = batch.map_err(|e| broken(path, kind, &format!("behind row {}: {e}", self.rows)))?;
        let before = self.rows;
        self.rows += batch.num_rows() as u64;
        Ok(Some((batch, before)))
    }
}

/// An error where an Arrow file's footer names blocks beyond its end: their reader asks for memory before it looks.
fn check_blocks(source: &mut (impl Read + Seek)) -> Result<(), String> {
    let io = |e: std::io::Error| e.to_string();
    let size = source.seek(SeekFrom::End(0)).map_err(io)?;
    let mut end = [0; 10];
    if size >= 10 {
        source.seek(SeekFrom::End(-10)).map_err(io)?;
        source.read_exact(&mut end).map_err(io)?;
        let length = arrow_ipc::reader::read_footer_length(end).map_err(|e| e.to_string())?;
        if length as u64 + 10 > size {
            return Err("its footer is longer than the file".into());
        }
        source.seek(SeekFrom::Start(size - 10 - length as u64)).map_err(io)?;
        let mut footer = vec![0; length];
        source.read_exact(&mut footer).map_err(io)?;
        let footer = arrow_ipc::root_as_footer(&footer).map_err(|e| e.to_string())?;
        let blocks = footer.recordBatches().into_iter().flatten();
        for block in blocks.chain(footer.dictionaries().into_iter().flatten()) {
            let parts = [block.offset(), i64::from(block.metaDataLength()), block.bodyLength()];
            let end = parts.iter().try_fold(0u64, |sum, &n| sum.checked_add(u64::try_from(n).ok()?));
            if end.is_none_or(|end| end > size) {
                return Err("its footer names data beyond its end".into());
            }
        }
    }
    source.rewind().map_err(io)
}

fn broken(path: &Path, kind: &str, problem: &str) -> DataError {
    let problem: String = problem.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
    let problem = format!("not a readable {kind} file: {problem}; write it again, or check data.format");
    DataError::Format { path: path.to_path_buf(), problem }
}

/// What a column's lists hold, where it has lists.
fn items_of(kind: &DataType) -> Option<&DataType> {
    match kind {
        DataType::List(f)
        | DataType::LargeList(f)
        | DataType::FixedSizeList(f, _)
        | DataType::ListView(f) => Some(f.data_type()),
        _ => None,
    }
}

fn is_list(kind: &DataType) -> bool {
    items_of(kind).is_some()
}

/// Whether no column can be made of such values.
fn is_odd(kind: &DataType) -> bool {
    match kind {
        DataType::Struct(_) | DataType::Map(..) | DataType::Union(..) | DataType::RunEndEncoded(..) => true,
        _ => items_of(kind).is_some_and(|k| items_of(k).is_some() || is_odd(k)),
    }
}

/// Whether a column holds texts, or lists of them.
fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, inner) => is_text(inner),
        _ => items_of(kind).is_some_and(is_text),
    }
}

/// One column of a batch in the forms that its uses need.
#[derive(Default)]
struct Column {
    number: Option<Float64Array>,
    text: Option<LargeStringArray>,
    list: Option<(LargeListArray, LargeStringArray)>,
    /// The values of a list as one text, `|` between them.
    joined: bool,
}

/// The texts of an array's values; `whole`: of 35.0 it is 35, as where a program kept whole numbers as such.
fn text_of(array: &ArrayRef, whole: bool) -> Result<LargeStringArray, String> {
    let cast = |array: &ArrayRef, kind: &DataType| arrow_cast::cast(array, kind).map_err(|e| e.to_string());
    let array = match array.data_type() {
        DataType::Dictionary(_, inner) if !is_text(inner) => cast(array, inner)?,
        _ => Arc::clone(array),
    };
    let array = match array.data_type() {
        // "true" is no label, 1 is
        DataType::Boolean => cast(&array, &DataType::UInt8)?,
        _ => array,
    };
    // the shortest digits that say a float, as other programs write it
    let text: LargeStringArray = match array.data_type() {
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            bytes_of(&array)?
        }
        // zones are not known here: the instant, in UTC
        DataType::Timestamp(unit, Some(_)) => {
            let data = array.to_data().into_builder().data_type(DataType::Timestamp(*unit, None));
            let plain = arrow_array::make_array(data.build().map_err(|e| e.to_string())?);
            cast(&plain, &DataType::LargeUtf8)?.as_string::<i64>().clone()
        }
        DataType::Float32 => {
            array.as_primitive::<Float32Type>().iter().map(|v| v.map(|v| format!("{v:?}"))).collect()
        }
        DataType::Float64 => {
            array.as_primitive::<Float64Type>().iter().map(|v| v.map(|v| format!("{v:?}"))).collect()
        }
        _ => cast(&array, &DataType::LargeUtf8)?.as_string::<i64>().clone(),
    };
    let number = array.data_type().is_floating() || array.data_type().is_decimal();
    if !number {
        return Ok(text);
    }
    // NaN is no value
    let value = |t: &str| match Form::Number.canonical(t.as_bytes()) {
        _ if t == "NaN" => None,
        Some(plain) if whole && !plain.contains('.') => Some(plain),
        _ => Some(t.to_string()),
    };
    Ok(text.iter().map(|t| t.and_then(value)).collect())
}

/// The texts of bytes: themselves where they are UTF-8, else their hexadecimal digits.
fn bytes_of(array: &ArrayRef) -> Result<LargeStringArray, String> {
    let fixed = matches!(array.data_type(), DataType::FixedSizeBinary(_));
    let array = match fixed {
        true => Arc::clone(array),
        false => arrow_cast::cast(array, &DataType::LargeBinary).map_err(|e| e.to_string())?,
    };
    let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => text.to_string(),
        Err(_) => bytes.iter().map(|b| format!("{b:02x}")).collect(),
    };
    Ok(match fixed {
        true => array.as_fixed_size_binary().iter().map(|v| v.map(text)).collect(),
        false => array.as_binary::<i64>().iter().map(|v| v.map(text)).collect(),
    })
}

/// The numbers of an array. Of 32 bits they are what their text says: 0.1 is the 0.1 of other files.
fn numbers_of(array: &ArrayRef) -> Result<Float64Array, String> {
    if array.data_type() == &DataType::Float32 {
        let exact = |v: f32| match v.fract() == 0.0 || !v.is_finite() {
            true => f64::from(v),
            false => v.to_string().parse().unwrap_or(f64::from(v)),
        };
        let values = array.as_primitive::<Float32Type>().iter();
        return Ok(values.map(|v| v.map(exact)).collect());
    }
    let numbers = arrow_cast::cast(array, &DataType::Float64).map_err(|e| e.to_string())?;
    Ok(numbers.as_primitive::<Float64Type>().clone())
}

impl Column {
    fn new(array: &ArrayRef, plan: &Plan, i: usize) -> Result<Column, String> {
        let uses = plan.uses(i);
        let mut column = Column::default();
        let kind = array.data_type().clone();
        let is_list = is_list(&kind);
        if uses.number && (kind.is_numeric() || kind == DataType::Boolean) {
            column.number = Some(numbers_of(array)?);
        }
        // what is only copied to an output is joined
        column.joined = is_list && uses.text && plan.only_passed(i);
        if (uses.list || column.joined) && is_list {
            let inner = items_of(&kind).cloned().unwrap_or(DataType::LargeUtf8);
            let inner = Arc::new(Field::new_list_field(inner, true));
            let lists = arrow_cast::cast(array, &DataType::LargeList(inner)).map_err(|e| e.to_string())?;
            let lists = lists.as_list::<i64>().clone();
            let values = text_of(lists.values(), plan.of_texts(i))?;
            column.list = Some((lists, values));
        }
        if is_list && ((uses.text && !column.joined) || (uses.number && column.number.is_none())) {
            return Err(format!("it holds {kind}, of which only a list column can be made"));
        }
        if (uses.text && !column.joined)
            || (uses.number && column.number.is_none())
            || (uses.list && column.list.is_none())
        {
            column.text = Some(text_of(array, plan.of_texts(i))?);
        } else if column.number.is_some() && plan.has_na() {
            // a number may mean that the value is missing
            column.text = Some(text_of(array, true)?);
        }
        Ok(column)
    }
}

struct RowFields<'a> {
    columns: &'a [Column],
    ranges: &'a [(u32, u32)],
    items: &'a [Vec<(u32, u32)>],
    row: usize,
}

impl Fields for RowFields<'_> {
    fn range(&self, i: usize) -> (u32, u32) {
        self.ranges[i]
    }

    fn number(&self, i: usize, text: &[u8]) -> Option<f64> {
        match &self.columns[i].number {
            Some(n) if n.is_null(self.row) => Some(f64::NAN),
            // beyond the range of f32 it is no feature; NaN is missing
            Some(n) => Some(n.value(self.row)).filter(|v| v.is_nan() || v.abs() <= f64::from(f32::MAX)),
            None => {
                let (start, end) = self.ranges[i];
                super::number::parse_number(&text[start as usize..end as usize])
            }
        }
    }

    fn items(&self, i: usize) -> Option<&[(u32, u32)]> {
        self.columns[i].list.as_ref().map(|_| &self.items[i][..])
    }
}

/// The rows of a batch whose first row is number `before` + 1; with `stop`, up to its first bad row. The error
/// names a column.
pub(crate) fn rows_of<S: Sink>(
    batch: &RecordBatch,
    before: u64,
    plan: &Plan,
    stop: bool,
    mut rows: S,
) -> Result<(S, Problems), (String, String)> {
    let mut problems = vec![];
    let schema = batch.schema();
    // a name that stands twice is used nowhere: the plan refuses it
    let find = |name: &str| schema.fields().iter().position(|f| f.name() == name);
    let columns: Vec<Column> = plan
        .names
        .iter()
        .enumerate()
        .map(|(i, name)| match find(name) {
            Some(at) => Column::new(batch.column(at), plan, i).map_err(|e| (name.clone(), e)),
            None => Ok(Column::default()),
        })
        .collect::<Result<_, _>>()?;
    let mut text = Vec::new();
    let mut ranges = vec![(0, 0); columns.len()];
    let mut items = vec![vec![]; columns.len()];
    for row in 0..batch.num_rows() {
        let mut problem = None;
        let mut add = |value: &str, name: &str, text: &mut Vec<u8>| {
            if text.len() + value.len() > i32::MAX as usize {
                let problem_text =
                    format!("{} is too long", quoted(&value.as_bytes()[..value.len().min(200)]));
                problem = Some(RowProblem::Value { column: name.into(), problem: problem_text });
                return (0, 0);
            }
            let start = text.len() as u32;
            text.extend_from_slice(value.as_bytes());
            (start, text.len() as u32)
        };
        for (i, column) in columns.iter().enumerate() {
            let name = &plan.names[i];
            ranges[i] = (0, 0);
            if let Some(t) = &column.text {
                ranges[i] = if t.is_null(row) { (0, 0) } else { add(t.value(row), name, &mut text) };
            } else if let Some(n) = &column.number
                && !n.is_null(row)
                && n.value(row).abs() > f64::from(f32::MAX)
            {
                // no feature: for the message
                ranges[i] = add(&format!("{:e}", n.value(row)), name, &mut text);
            }
            if let Some((lists, values)) = &column.list {
                items[i].clear();
                if !lists.is_null(row) {
                    let offsets = lists.value_offsets();
                    for k in offsets[row] as usize..offsets[row + 1] as usize {
                        // a null or empty item is no value
                        if !values.is_null(k) && !values.value(k).is_empty() {
                            items[i].push(add(values.value(k), name, &mut text));
                        }
                    }
                }
                if column.joined {
                    let parts: Vec<&[u8]> =
                        items[i].iter().map(|&(a, b)| &text[a as usize..b as usize]).collect();
                    let all = String::from_utf8_lossy(&parts.join(&b'|')).into_owned();
                    ranges[i] = add(&all, name, &mut text);
                }
            }
        }
        let line = before + row as u64 + 1;
        let fields = RowFields { columns: &columns, ranges: &ranges, items: &items, row };
        let result = match problem {
            Some(p) => Err(p),
            None => plan.push(&text, line, &fields, &mut rows),
        };
        if let Err(p) = result {
            problems.push((line, p));
            if stop {
                break;
            }
        }
    }
    let _ = rows.finish(text);
    Ok((rows, problems))
}
