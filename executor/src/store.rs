//! What must outlive a crash: which term reigns, and the record of the layout in force.
//!
//! One append-only file, one line an entry, each line with the checksum of its text. An entry counts once it is
//! synced. A last line that a crash cut short is no entry and is cut off when the file is opened; a damaged line
//! before others is an error, since what follows may rest on it. One process at a time holds the file.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use infercluster_serving::handover::Record;
use infercluster_spec::{Epoch, Term};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// The name of the file in its folder.
const FILE_NAME: &str = "records.log";
/// Longest log that is read: entries are small, and one or two are written a change of layout.
const LOG_LIMIT: u64 = 256 << 20;

/// Why the store did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The system refused.
    #[error("{}: {what} failed: {source}", file.display())]
    Io {
        /// Which file.
        file: PathBuf,
        /// What was done.
        what: &'static str,
        /// What the system says.
        source: std::io::Error,
    },
    /// Another process holds the file.
    #[error("{} is held by another coordinator", file.display())]
    Held {
        /// Which file.
        file: PathBuf,
    },
    /// Longer than a log can be.
    #[error("{} has {length} bytes, the limit is {LOG_LIMIT}", file.display())]
    TooLong {
        /// Which file.
        file: PathBuf,
        /// Its length.
        length: u64,
    },
    /// A line that is no entry.
    #[error("{} is damaged in line {line}", file.display())]
    Damaged {
        /// Which file.
        file: PathBuf,
        /// Which line, from 1.
        line: usize,
    },
    /// A record of a reign that is not the present one.
    #[error("the record is of {found}, {reigns} reigns")]
    Term {
        /// The record's term.
        found: Term,
        /// The term in force.
        reigns: Term,
    },
    /// A record that does not follow the one in force.
    #[error("the record is of {found}, {expected} comes next")]
    Epoch {
        /// The record's epoch.
        found: Epoch,
        /// The epoch that may follow.
        expected: Epoch,
    },
}

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Entry {
    /// A coordinator begins to reign.
    Term(Term),
    /// A layout is in force.
    Record(Record),
}

/// The store of one machine.
#[derive(Debug)]
pub struct RecordLog {
    path: PathBuf,
    file: File,
    term: Term,
    record: Option<Record>,
}

impl RecordLog {
    /// Opens the log of a folder, which both are made where they are missing.
    pub fn open(folder: &Path) -> Result<Self, StoreError> {
        let path = folder.join(FILE_NAME);
        let failed = |what| {
            let file = path.clone();
            move |source| StoreError::Io { file, what, source }
        };
        std::fs::create_dir_all(folder).map_err(failed("making its folder"))?;
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(failed("opening"))?;
        if file.try_lock().is_err() {
            return Err(StoreError::Held { file: path });
        }
        // The file's name must outlive a crash as its content does.
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(failed("syncing its folder"))?;
        let mut log = Self {
            path,
            file,
            term: Term(0),
            record: None,
        };
        log.replay()?;
        Ok(log)
    }

    /// The term that reigns; 0 where none ever did.
    pub fn term(&self) -> Term {
        self.term
    }

    /// The record of the layout in force.
    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// Begins a reign above every other and above `above`.
    pub fn take_term(&mut self, above: Term) -> Result<Term, StoreError> {
        let term = Term(self.term.max(above).0 + 1);
        self.append(&Entry::Term(term))?;
        self.term = term;
        Ok(term)
    }

    /// Puts a layout in force: compare-and-swap on (term, epoch).
    pub fn swap(&mut self, record: &Record) -> Result<(), StoreError> {
        if record.term != self.term {
            return Err(StoreError::Term {
                found: record.term,
                reigns: self.term,
            });
        }
        let expected = self.next_epoch();
        if record.epoch != expected {
            return Err(StoreError::Epoch {
                found: record.epoch,
                expected,
            });
        }
        self.append(&Entry::Record(record.clone()))?;
        self.record = Some(record.clone());
        Ok(())
    }

    /// The epoch that the next record has.
    pub fn next_epoch(&self) -> Epoch {
        Epoch(self.record.as_ref().map_or(0, |record| record.epoch.0) + 1)
    }

    fn append(&mut self, entry: &Entry) -> Result<(), StoreError> {
        let text = serde_json::to_string(entry).expect("entries are plain values");
        let line = format!("{:016x} {text}\n", xxh3_64(text.as_bytes()));
        let written = self.file.write_all(line.as_bytes());
        written
            .and_then(|()| self.file.sync_data())
            .map_err(|source| self.io("appending", source))
    }

    fn replay(&mut self) -> Result<(), StoreError> {
        let length = self
            .file
            .metadata()
            .map_err(|source| self.io("measuring", source))?
            .len();
        if length > LOG_LIMIT {
            return Err(StoreError::TooLong {
                file: self.path.clone(),
                length,
            });
        }
        let mut bytes = Vec::new();
        self.file
            .read_to_end(&mut bytes)
            .map_err(|source| self.io("reading", source))?;
        let mut whole = 0;
        for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
            let is_last = whole + line.len() == bytes.len();
            match parse(line) {
                Some(Entry::Term(term)) => self.term = self.term.max(term),
                Some(Entry::Record(record)) => self.record = Some(record),
                None if is_last => break,
                None => {
                    return Err(StoreError::Damaged {
                        file: self.path.clone(),
                        line: index + 1,
                    });
                }
            }
            whole += line.len();
        }
        if whole < bytes.len() {
            tracing::warn!(
                "{}: its last line was cut short and is dropped",
                self.path.display()
            );
            self.file
                .set_len(whole as u64)
                .and_then(|()| self.file.sync_all())
                .map_err(|source| self.io("cutting off its last line", source))?;
        }
        self.file
            .seek(SeekFrom::End(0))
            .map(drop)
            .map_err(|source| self.io("seeking", source))
    }

    fn io(&self, what: &'static str, source: std::io::Error) -> StoreError {
        StoreError::Io {
            file: self.path.clone(),
            what,
            source,
        }
    }
}

fn parse(line: &[u8]) -> Option<Entry> {
    let line = std::str::from_utf8(line.strip_suffix(b"\n")?).ok()?;
    let (checksum, text) = line.split_once(' ')?;
    let holds = u64::from_str_radix(checksum, 16).ok()? == xxh3_64(text.as_bytes());
    holds.then(|| serde_json::from_str(text).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use infercluster_serving::handover::HandoverId;
    use infercluster_spec::{GpuId, StepId};

    use super::*;

    fn record(term: u64, epoch: u64) -> Record {
        Record {
            term: Term(term),
            epoch: Epoch(epoch),
            layout: HandoverId(epoch),
            roster: [GpuId(0), GpuId(1)].into(),
            first_step: StepId(10 * epoch),
        }
    }

    #[test]
    fn what_was_swapped_in_is_there_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = RecordLog::open(folder.path()).unwrap();
        assert_eq!(
            (log.term(), log.record(), log.next_epoch()),
            (Term(0), None, Epoch(1))
        );
        assert_eq!(log.take_term(Term(0)).unwrap(), Term(1));
        log.swap(&record(1, 1)).unwrap();
        log.swap(&record(1, 2)).unwrap();
        drop(log);
        let mut log = RecordLog::open(folder.path()).unwrap();
        assert_eq!((log.term(), log.record()), (Term(1), Some(&record(1, 2))));
        assert_eq!(log.take_term(Term(6)).unwrap(), Term(7));
    }

    #[test]
    fn only_the_reigning_term_may_write_and_only_the_next_epoch() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = RecordLog::open(folder.path()).unwrap();
        log.take_term(Term(0)).unwrap();
        log.swap(&record(1, 1)).unwrap();
        log.take_term(Term(1)).unwrap();
        let cases = [
            (record(1, 2), "the record is of term 1, term 2 reigns"),
            (record(3, 2), "the record is of term 3, term 2 reigns"),
            (record(2, 1), "the record is of epoch 1, epoch 2 comes next"),
            (record(2, 3), "the record is of epoch 3, epoch 2 comes next"),
        ];
        for (record, expected) in cases {
            assert_eq!(log.swap(&record).unwrap_err().to_string(), expected);
        }
        assert_eq!(
            log.record().unwrap().epoch,
            Epoch(1),
            "a refused record changes nothing"
        );
        log.swap(&record(2, 2)).unwrap();
    }

    #[test]
    fn a_torn_last_line_is_dropped_and_damage_before_it_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = RecordLog::open(folder.path()).unwrap();
        log.take_term(Term(0)).unwrap();
        log.swap(&record(1, 1)).unwrap();
        log.swap(&record(1, 2)).unwrap();
        drop(log);
        let path = folder.path().join(FILE_NAME);
        let whole = std::fs::read(&path).unwrap();
        let second = whole.len()
            - whole
                .split_inclusive(|byte| *byte == b'\n')
                .next_back()
                .unwrap()
                .len();
        for length in second..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let mut log = RecordLog::open(folder.path()).unwrap();
            assert_eq!(log.record(), Some(&record(1, 1)), "{length} bytes are left");
            log.swap(&record(1, 2)).unwrap();
            drop(log);
            assert_eq!(std::fs::read(&path).unwrap(), whole);
        }
        let mut damaged = whole;
        damaged[3] ^= 1;
        std::fs::write(&path, damaged).unwrap();
        let error = RecordLog::open(folder.path()).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { line: 1, .. }), "{error}");
    }

    #[test]
    fn two_coordinators_do_not_share_a_log() {
        let folder = tempfile::tempdir().unwrap();
        let _first = RecordLog::open(folder.path()).unwrap();
        let second = RecordLog::open(folder.path());
        assert!(matches!(second, Err(StoreError::Held { .. })));
    }
}
