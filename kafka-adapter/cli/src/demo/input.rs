//! Reads the CSV file that is produced: the built-in flights or a file of the user's.
//!
//! The whole input is read and checked before anything is produced, so a bad line leaves nothing half-written.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use indexmap::IndexSet;

/// All flights that left New York in January 2013.
const FLIGHTS: &[u8] = include_bytes!("../../data/flights-2013-01.csv.xz");

/// The input is kept in memory.
const MOST_INPUT: usize = 1 << 30;

/// Longest line and key together, in bytes. With its headers the record has to stay below the client's `message.max.bytes`
/// of 1,000,000.
const MOST_RECORD: usize = 900_000;

/// The records to produce, in the order of the file.
#[derive(Debug)]
pub(crate) struct Input {
    data: Vec<u8>,
    rows: Vec<Row>,
    keys: IndexSet<Box<[u8]>>,
}

#[derive(Debug, Clone, Copy)]
struct Row {
    start: u32,
    end: u32,
    key: Option<u32>,
}

/// Why an input cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    /// The file cannot be opened or read.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The compressed stream is damaged or no such stream at all.
    #[error("{} is not a valid {format} file: {source}", path.display())]
    Compressed { path: PathBuf, format: &'static str, source: io::Error },
    /// More bytes than the demo keeps.
    #[error("{} is too large: the demo keeps its input in memory, at most {most} bytes", path.display())]
    TooLarge { path: PathBuf, most: usize },
    /// No header line.
    #[error("{} is empty: a header line was expected", path.display())]
    Empty { path: PathBuf },
    /// A header line and nothing else.
    #[error("{} has a header line and no records", path.display())]
    NoRecords { path: PathBuf },
    /// The key column does not exist.
    #[error("{} has no column `{column}`; its columns are: {}", path.display(), columns.join(", "))]
    NoColumn { path: PathBuf, column: String, columns: Vec<String> },
    /// A row with more or fewer fields than the header.
    #[error("{}, line {line}: {found} fields, but the header has {expected}", path.display())]
    Ragged { path: PathBuf, line: usize, expected: u64, found: u64 },
    /// The file ends inside a quoted field.
    #[error("{}, line {line}: a quoted field is not closed", path.display())]
    OpenQuote { path: PathBuf, line: usize },
    /// One record is too large for Kafka's usual limit.
    #[error("{}, line {line}: a record of {bytes} bytes, at most {most} fit into a message", path.display())]
    TooLong { path: PathBuf, line: usize, bytes: usize, most: usize },
}

impl Input {
    /// Reads `path`, or the built-in flights, with the keys of `column`.
    ///
    /// # Errors
    ///
    /// Names the file, and the line or column where there is one.
    pub(crate) fn load(path: Option<&Path>, column: &str) -> Result<Self, InputError> {
        match path {
            Some(path) => {
                let read = |source| InputError::Read { path: path.to_owned(), source };
                let file = File::open(path).map_err(read)?;
                Self::parse(path, decompress(path, file, MOST_INPUT)?, column)
            }
            None => {
                let path = Path::new("flights-2013-01.csv.xz (built in)");
                Self::parse(path, unpack(path, Format::Xz, FLIGHTS, MOST_INPUT)?, column)
            }
        }
    }

    fn parse(path: &Path, data: Vec<u8>, column: &str) -> Result<Self, InputError> {
        let file = Source { path, data: &data };
        let mut reader = csv::ReaderBuilder::new().from_reader(data.as_slice());
        let header = reader.byte_headers().map_err(|error| file.error(error, 0))?.clone();
        if header.is_empty() {
            return Err(InputError::Empty { path: path.to_owned() });
        }
        let mut start = reader.position().byte() as usize;
        if ends_in_a_quote(&data[..start]) {
            return Err(InputError::OpenQuote { path: path.to_owned(), line: 1 });
        }
        let Some(column) = header.iter().position(|name| name == column.as_bytes()) else {
            return Err(InputError::NoColumn {
                path: path.to_owned(),
                column: column.to_owned(),
                columns: columns(&header),
            });
        };

        let mut rows = Vec::new();
        let mut keys = IndexSet::new();
        let mut record = csv::ByteRecord::new();
        let mut last = 0..0;
        while reader.read_byte_record(&mut record).map_err(|error| file.error(error, start))? {
            let end = reader.position().byte() as usize;
            let line = file.trimmed(start, end);
            start = end;
            let key = &record[column];
            if line.len() + key.len() > MOST_RECORD {
                return Err(InputError::TooLong {
                    path: path.to_owned(),
                    line: file.line(line.start),
                    bytes: line.len() + key.len(),
                    most: MOST_RECORD,
                });
            }
            let key = (!key.is_empty()).then(|| match keys.get_index_of(key) {
                Some(known) => known as u32,
                None => keys.insert_full(Box::from(key)).0 as u32,
            });
            rows.push(Row { start: line.start as u32, end: line.end as u32, key });
            last = line;
        }
        if ends_in_a_quote(&data[last.clone()]) {
            return Err(InputError::OpenQuote {
                path: path.to_owned(),
                line: file.line(last.start),
            });
        }
        if rows.is_empty() {
            return Err(InputError::NoRecords { path: path.to_owned() });
        }
        Ok(Self { data, rows, keys })
    }

    /// Number of records, at least 1.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// The whole line of a record, without its line end.
    pub(crate) fn value(&self, row: usize) -> &[u8] {
        let row = self.rows[row];
        &self.data[row.start as usize..row.end as usize]
    }

    /// Rank of a record's key among all keys; `None` if the record has no key.
    pub(crate) fn key(&self, row: usize) -> Option<usize> {
        self.rows[row].key.map(|key| key as usize)
    }

    /// All distinct keys, in the order of their first record.
    pub(crate) fn keys(&self) -> &IndexSet<Box<[u8]>> {
        &self.keys
    }
}

/// The names of the columns, fit for a message even if the file is no text at all.
fn columns(header: &csv::ByteRecord) -> Vec<String> {
    const MOST: usize = 60;
    let name =
        |name: &[u8]| String::from_utf8_lossy(name).escape_debug().take(MOST).collect::<String>();
    let mut columns: Vec<String> = header.iter().take(MOST).map(name).collect();
    if header.len() > MOST {
        columns.push(format!("and {} more", header.len() - MOST));
    }
    columns
}

/// A file being parsed, for the positions in errors.
struct Source<'a> {
    path: &'a Path,
    data: &'a [u8],
}

impl Source<'_> {
    /// The record between two positions of the reader: blank lines before it and the line end behind it do not belong to
    /// it. A quoted field that begins or ends with a line end is safe, for the quotes stand outside.
    fn trimmed(&self, start: usize, end: usize) -> std::ops::Range<usize> {
        let is_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
        let bytes = &self.data[start..end];
        let before = bytes.iter().take_while(|byte| is_end(byte)).count();
        let behind = bytes[before..].iter().rev().take_while(|byte| is_end(byte)).count();
        start + before..end - behind
    }

    /// Number of the line, from 1, on which the byte at `position` stands.
    fn line(&self, position: usize) -> usize {
        1 + self.data[..position].iter().filter(|byte| **byte == b'\n').count()
    }

    /// `start`: where the reader stood before the record that failed.
    fn error(&self, error: csv::Error, start: usize) -> InputError {
        let path = self.path.to_owned();
        match error.into_kind() {
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                let record = self.trimmed(start, self.data.len());
                // An open quote swallows what follows and shows as a wrong number of fields: say which it is.
                if ends_in_a_quote(&self.data[record.clone()])
                    && !ends_within(&self.data[record.clone()])
                {
                    return InputError::OpenQuote { path, line: self.line(record.start) };
                }
                InputError::Ragged {
                    path,
                    line: self.line(record.start),
                    expected: expected_len,
                    found: len,
                }
            }
            csv::ErrorKind::Io(source) => InputError::Read { path, source },
            other => InputError::Read { path, source: io::Error::other(format!("{other:?}")) },
        }
    }
}

/// Whether `data`, which begins at a record, ends inside a quoted field: then a further line would belong to that field.
fn ends_in_a_quote(data: &[u8]) -> bool {
    records(data.chain(&b"\nx\n"[..])) == records(data)
}

/// Whether the first record of `data` ends before `data` does.
fn ends_within(data: &[u8]) -> bool {
    records(data) > 1
}

/// Number of CSV records.
fn records(data: impl Read) -> usize {
    let reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(data);
    reader.into_byte_records().count()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Plain,
    Gzip,
    Xz,
}

impl Format {
    /// By the name; a file whose name says nothing may still begin like a compressed one.
    fn of(path: &Path, start: &[u8]) -> Self {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some(extension) if extension.eq_ignore_ascii_case("gz") => Self::Gzip,
            Some(extension) if extension.eq_ignore_ascii_case("xz") => Self::Xz,
            _ if start.starts_with(b"\x1f\x8b") => Self::Gzip,
            _ if start.starts_with(b"\xfd7zXZ\0") => Self::Xz,
            _ => Self::Plain,
        }
    }
}

fn decompress(path: &Path, mut file: impl Read, most: usize) -> Result<Vec<u8>, InputError> {
    let mut start = Vec::new();
    let read = |source| InputError::Read { path: path.to_owned(), source };
    file.by_ref().take(6).read_to_end(&mut start).map_err(read)?;
    let format = Format::of(path, &start);
    unpack(path, format, start.chain(file), most)
}

fn unpack(
    path: &Path,
    format: Format,
    file: impl Read,
    most: usize,
) -> Result<Vec<u8>, InputError> {
    let mut data = Vec::new();
    let limit = most as u64 + 1;
    let (read, name) = match format {
        Format::Plain => (file.take(limit).read_to_end(&mut data), ""),
        Format::Gzip => {
            (flate2::read::MultiGzDecoder::new(file).take(limit).read_to_end(&mut data), "gzip")
        }
        Format::Xz => (
            liblzma::read::XzDecoder::new_multi_decoder(file).take(limit).read_to_end(&mut data),
            "xz",
        ),
    };
    match read {
        Err(source) if format == Format::Plain => {
            Err(InputError::Read { path: path.to_owned(), source })
        }
        Err(source) => Err(InputError::Compressed { path: path.to_owned(), format: name, source }),
        Ok(_) if data.len() > most => Err(InputError::TooLarge { path: path.to_owned(), most }),
        Ok(_) => Ok(data),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn parse(text: &str, column: &str) -> Result<Input, InputError> {
        Input::parse(Path::new("in.csv"), text.as_bytes().to_vec(), column)
    }

    fn failure(text: &str, column: &str) -> String {
        parse(text, column).expect_err("bad input").to_string()
    }

    /// Values and keys, as text.
    fn content(input: &Input) -> Vec<(Option<&str>, &str)> {
        let text = |bytes| std::str::from_utf8(bytes).expect("text");
        let key = |row| input.key(row).map(|key| text(&input.keys()[key]));
        (0..input.len()).map(|row| (key(row), text(input.value(row)))).collect()
    }

    #[test]
    fn the_built_in_flights_are_whole() {
        let input = Input::load(None, "tailnum").expect("built-in input");
        assert_eq!(input.len(), 27_004);
        assert_eq!(
            content(&input)[0],
            (
                Some("N14228"),
                "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z"
            )
        );
        assert!(input.keys().contains("NA".as_bytes()), "NA is a key as any other");
    }

    #[test]
    fn a_value_is_the_raw_line() {
        let input = parse("a,k\n1,\"x\"\n  2 ,y\r\n3,x\n", "k").expect("good input");
        assert_eq!(
            content(&input),
            [(Some("x"), "1,\"x\""), (Some("y"), "  2 ,y"), (Some("x"), "3,x")]
        );
        assert_eq!(input.keys().len(), 2);
    }

    #[test]
    fn a_quoted_line_end_stays_in_its_record() {
        let text = concat!("k,text\n", "a,\"one\ntwo\"\n", "\"b\n\",\"say \"\"hi\"\"\"\n", "c,d");
        let input = parse(text, "k").expect("good input");
        let expected = [
            (Some("a"), "a,\"one\ntwo\""),
            (Some("b\n"), "\"b\n\",\"say \"\"hi\"\"\""),
            (Some("c"), "c,d"),
        ];
        assert_eq!(content(&input), expected);
    }

    #[test]
    fn an_empty_key_is_no_key() {
        let input = parse("k,v\n,1\n\"\",2\n ,3\nNA,4\n", "k").expect("good input");
        assert_eq!(
            content(&input),
            [(None, ",1"), (None, "\"\",2"), (Some(" "), " ,3"), (Some("NA"), "NA,4")]
        );
    }

    #[test]
    fn blank_lines_and_a_byte_order_mark_belong_to_no_record() {
        let input =
            parse("\u{feff}k,v\r\n\r\n\r\na,1\r\n\r\nb,2\r\n\r\n", "k").expect("good input");
        assert_eq!(content(&input), [(Some("a"), "a,1"), (Some("b"), "b,2")]);
    }

    #[test]
    fn bytes_need_not_be_text() {
        let input =
            Input::parse(Path::new("in.csv"), b"k\n\xff\xfe\n".to_vec(), "k").expect("good input");
        assert_eq!(input.value(0), b"\xff\xfe");
        assert_eq!(&*input.keys()[0], b"\xff\xfe");
    }

    #[test]
    fn a_ragged_row_is_named_by_its_line() {
        assert_eq!(failure("k,v\na,1\nb\n", "k"), "in.csv, line 3: 1 fields, but the header has 2");
        assert_eq!(
            failure("k,v\n\"a\n\",1\n\n\nb,2,3\nc,4\n", "k"),
            "in.csv, line 6: 3 fields, but the header has 2"
        );
    }

    #[test]
    fn an_open_quote_is_named_by_the_line_of_its_record() {
        assert_eq!(
            failure("k,v\na,1\nb,\"2\nc,3\n", "k"),
            "in.csv, line 3: a quoted field is not closed"
        );
        assert_eq!(
            failure("k,v\na,1\n\"b,2\nc,3\n", "k"),
            "in.csv, line 3: a quoted field is not closed"
        );
        assert_eq!(failure("k,\"v\na,1\n", "k"), "in.csv, line 1: a quoted field is not closed");
        assert_eq!(
            failure("k,v\na,1,2\nb,\"2\n", "k"),
            "in.csv, line 2: 3 fields, but the header has 2"
        );
        parse("k,v\na,\"1\"", "k").expect("closed, without a line end");
    }

    #[test]
    fn a_missing_column_is_named_with_those_that_exist() {
        assert_eq!(
            failure("a,b\n1,2\n", "tail"),
            "in.csv has no column `tail`; its columns are: a, b"
        );
        let wide = (0..100).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
        assert!(failure(&wide, "k").ends_with("58, 59, and 40 more"));
    }

    #[test]
    fn nothing_to_produce_is_an_error() {
        assert!(failure("", "k").starts_with("in.csv is empty"));
        assert!(failure("\n\n", "k").starts_with("in.csv is empty"));
        assert_eq!(failure("k\n\n", "k"), "in.csv has a header line and no records");
    }

    #[test]
    fn a_record_larger_than_a_message_is_refused() {
        let text = format!("k,v\na,1\nb,{}\n", "x".repeat(MOST_RECORD));
        assert_eq!(
            failure(&text, "k"),
            "in.csv, line 3: a record of 900003 bytes, at most 900000 fit into a message"
        );
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut file = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        file.write_all(bytes).expect("memory");
        file.finish().expect("memory")
    }

    fn xz(bytes: &[u8]) -> Vec<u8> {
        let mut file = liblzma::write::XzEncoder::new(Vec::new(), 1);
        file.write_all(bytes).expect("memory");
        file.finish().expect("memory")
    }

    #[test]
    fn compressed_files_are_read_whole() {
        let text = "k,v\n".to_owned() + &"a,1\n".repeat(100_000);
        for (name, bytes) in [
            ("in.csv.gz", gzip(text.as_bytes())),
            ("in.csv.xz", xz(text.as_bytes())),
            ("in.CSV.XZ", xz(text.as_bytes())),
            // By content, if the name does not say.
            ("in.csv", gzip(text.as_bytes())),
            ("in", xz(text.as_bytes())),
            ("in.csv", text.as_bytes().to_vec()),
            // Several streams, as `cat` makes them.
            ("in.gz", [gzip(b"k,v\n"), gzip(&text.as_bytes()[4..])].concat()),
            ("in.xz", [xz(b"k,v\n"), xz(&text.as_bytes()[4..])].concat()),
        ] {
            let data = decompress(Path::new(name), bytes.as_slice(), MOST_INPUT).expect(name);
            assert!(data == text.as_bytes(), "{name}");
        }
    }

    #[test]
    fn a_damaged_compressed_file_is_an_error() {
        let text = "k,v\n".to_owned() + &"a,1\n".repeat(1_000);
        let cut = |mut bytes: Vec<u8>| {
            bytes.truncate(bytes.len() - 9);
            bytes
        };
        let flip = |mut bytes: Vec<u8>| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x55;
            bytes
        };
        for (name, bytes) in [
            ("a.gz", text.as_bytes().to_vec()),
            ("a.gz", Vec::new()),
            ("a.gz", cut(gzip(text.as_bytes()))),
            ("a.gz", flip(gzip(text.as_bytes()))),
            ("a.xz", text.as_bytes().to_vec()),
            ("a.xz", Vec::new()),
            ("a.xz", cut(xz(text.as_bytes()))),
            ("a.xz", flip(xz(text.as_bytes()))),
        ] {
            let error = decompress(Path::new(name), bytes.as_slice(), MOST_INPUT)
                .expect_err("damaged")
                .to_string();
            assert!(error.starts_with(&format!("{name} is not a valid ")), "{error}");
        }
    }

    #[test]
    fn an_input_beyond_the_limit_is_refused_before_it_is_held() {
        let bytes = gzip(&vec![b'x'; 10_000]);
        let error = decompress(Path::new("a.gz"), bytes.as_slice(), 9_999).expect_err("too large");
        assert!(matches!(error, InputError::TooLarge { most: 9_999, .. }));
        decompress(Path::new("a.gz"), bytes.as_slice(), 10_000).expect("exactly at the limit");
    }
}
