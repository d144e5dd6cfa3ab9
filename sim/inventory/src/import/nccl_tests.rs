//! Tables of nccl-tests (`all_reduce_perf` and its kin): a header that names columns, a row for each size.
//! Columns differ between versions and people trim them, so rows are judged by the header above them.

use std::collections::BTreeSet;

use super::error::ImportError;
use super::table::{Line, lines};
use super::text::Text;
use super::{Figure, Import, Kind};

/// Devices of one test that are looked at one by one.
const RANKS_LIMIT: usize = 4096;
/// Words that are no number in a row: types, operators, absent values.
const WORDS: [&str; 20] = [
    "N/A", "float", "double", "half", "bfloat16", "int8", "uint8", "int32", "uint32", "int64", "uint64",
    "none", "sum", "prod", "max", "min", "avg", "mulsum", "fp8_e4m3", "fp8_e5m2",
];

struct Reader {
    import: Import,
    /// Words of the last header.
    columns: usize,
    bus_columns: Vec<usize>,
    rows: usize,
    announced: Option<(u64, usize)>,
    rows_at_announcement: usize,
    bus_sum: f64,
    bus_count: usize,
    average: Option<(f64, usize)>,
    ranks: BTreeSet<(String, String)>,
    numbers: BTreeSet<u64>,
    /// Devices of each process by its own announcement, with the line.
    each: Option<(u64, usize)>,
    has_signs: bool,
}

pub(super) fn read(text: &Text) -> Result<Option<Import>, ImportError> {
    let is_known = text.body().contains("algbw") || text.body().contains("Avg bus bandwidth");
    if !is_known {
        return Ok(None);
    }
    let mut reader = Reader {
        import: Import::new(Kind::NcclTests),
        columns: 0,
        bus_columns: Vec::new(),
        rows: 0,
        announced: None,
        rows_at_announcement: 0,
        bus_sum: 0.0,
        bus_count: 0,
        average: None,
        ranks: BTreeSet::new(),
        numbers: BTreeSet::new(),
        each: None,
        has_signs: false,
    };
    let mut last_line = 0;
    for line in lines(text.body()) {
        reader.line(&line);
        last_line = line.number;
    }
    if !reader.has_signs {
        return Ok(None);
    }
    Ok(Some(reader.finish(last_line)))
}

impl Reader {
    fn line(&mut self, line: &Line) {
        let words = line.words();
        let plain: Vec<&str> = words.iter().copied().filter(|word| *word != "#").collect();
        if plain.contains(&"algbw") && plain.contains(&"busbw") {
            self.has_signs = true;
            self.columns = plain.len();
            self.bus_columns = (0..plain.len())
                .filter(|column| plain[*column] == "busbw")
                .collect();
        } else if plain.contains(&"minBytes") {
            self.settle();
            self.announced = sizes(&plain).map(|sizes| (sizes, line.number));
            let threads = after(&plain, "nThread").and_then(whole);
            let gpus = after(&plain, "nGpus").and_then(whole);
            let each = threads
                .zip(gpus)
                .and_then(|(threads, gpus)| threads.checked_mul(gpus));
            self.each = each.filter(|each| *each > 0).map(|each| (each, line.number));
            self.rows_at_announcement = self.rows;
        } else if line.text.contains("Avg bus bandwidth") {
            self.has_signs = true;
            self.average(line);
        } else if plain.first() == Some(&"Rank") && words.first() == Some(&"#") {
            self.rank(&plain);
        } else if words.first() != Some(&"#") {
            self.row(&words, line);
        }
    }

    fn row(&mut self, words: &[&str], line: &Line) {
        if words.first().and_then(|word| whole(word)).is_none() {
            return;
        }
        let is_row = words.iter().skip(1).all(|word| {
            WORDS.contains(word) || word.parse::<f64>().is_ok_and(f64::is_finite) || whole(word).is_some()
        });
        let expected = self.columns;
        if expected == 0 || words.len() == 1 && line.is_ended {
            return;
        }
        if !is_row || words.len() > expected {
            // A line of a log that starts with a number; one cut within a word stays a row.
            if is_row || words.len() < expected && !line.is_ended {
                self.import.lost(
                    line.number,
                    format!("{} words under {expected} columns", words.len()),
                );
            }
            return;
        }
        if words.len() < expected {
            let what = format!("the row has {} of {expected} columns", words.len());
            return self.import.lost(line.number, what);
        }
        self.rows += 1;
        for column in &self.bus_columns {
            if let Some(rate) = words.get(*column).and_then(|word| word.parse::<f64>().ok()) {
                self.bus_sum += rate;
                self.bus_count += 1;
            }
        }
    }

    fn average(&mut self, line: &Line) {
        let value = line
            .text
            .rsplit(':')
            .next()
            .and_then(|word| word.trim().parse::<f64>().ok());
        match value.filter(|value| value.is_finite()) {
            // A number that the text ends in may go on.
            Some(value) if line.is_ended || self.average.is_none() => {
                self.average = Some((value, line.number))
            }
            _ => self.import.lost(line.number, "the average has no number"),
        }
    }

    /// `# Rank 0 Pid 112 on node0 device 0 [0x00] A100-SXM4-40GB`.
    fn rank(&mut self, words: &[&str]) {
        if let Some((host, device)) = after(words, "on").zip(after(words, "device"))
            && self.ranks.len() < RANKS_LIMIT
        {
            self.numbers.extend(after(words, "Rank").and_then(whole));
            self.ranks.insert((host.to_owned(), device.to_owned()));
        }
    }

    /// Holds the rows of a run against its announcement.
    fn settle(&mut self) {
        let Some((sizes, line)) = self.announced.take() else {
            return;
        };
        let rows = (self.rows - self.rows_at_announcement) as u64;
        if rows < sizes {
            let what = format!("{sizes} sizes are announced, {rows} rows follow");
            self.import.lost(line, what);
        } else if rows > sizes && !rows.is_multiple_of(sizes) {
            self.import
                .problem(line, format!("{sizes} sizes are announced, {rows} rows follow"));
        }
    }

    fn finish(mut self, last_line: usize) -> Import {
        let was_announced = self.announced.is_some();
        self.settle();
        let mut import = self.import;
        import.count("data_rows", self.rows);
        let average = self.average.map(|(value, _)| Figure::Measured(value));
        import.counts.insert("avg_busbw".to_owned(), average);
        if self.rows == 0 {
            import.lost(last_line, "no row of the table is there in full");
        }
        match self.average {
            Some((average, line)) if self.bus_count > 0 && import.complete => {
                let own = self.bus_sum / self.bus_count as f64;
                // Rows are rounded to 0.01 GB/s.
                if (own - average).abs() > 0.02 + average.abs() * 1e-3 {
                    import.problem(
                        line,
                        format!("the average is {average}, that of the rows is {own:.4}"),
                    );
                }
            }
            None if was_announced => import.lost(last_line, "the closing average is missing"),
            _ => {}
        }
        let ranks = self.numbers.len() as u64;
        if let Some((each, line)) = self.each.filter(|_| ranks > 0)
            && (!ranks.is_multiple_of(each) || self.numbers.last() != Some(&(ranks - 1)))
        {
            let what = format!("{each} devices a process are announced, {ranks} ranks are listed");
            import.lost(line, what);
        }
        import.gpus = (!self.ranks.is_empty()).then_some(self.ranks.len() as u64);
        import
    }
}

/// The word behind another one.
fn after<'a>(words: &[&'a str], key: &str) -> Option<&'a str> {
    let at = words.iter().position(|word| *word == key)?;
    words.get(at + 1).copied()
}

/// `1_048_576` or `1048576`.
fn whole(word: &str) -> Option<u64> {
    let digits: String = word.chars().filter(|letter| *letter != '_').collect();
    digits.parse().ok().filter(|_| digits.len() <= 19)
}

/// How many sizes `minBytes 8 maxBytes 1024 step: 2(factor)` runs through.
fn sizes(words: &[&str]) -> Option<u64> {
    let (least, most) = (
        whole(after(words, "minBytes")?)?,
        whole(after(words, "maxBytes")?)?,
    );
    let (step, unit) = after(words, "step:")?.split_once('(')?;
    let step = whole(step)?;
    if unit.starts_with("factor") {
        if least == 0 {
            return None;
        }
        let mut size = least;
        let mut count = 0;
        while size <= most && count < 64 {
            count += 1;
            size = size.saturating_mul(step.max(2));
        }
        return Some(count);
    }
    (step > 0 && most >= least).then(|| (most - least) / step + 1)
}
