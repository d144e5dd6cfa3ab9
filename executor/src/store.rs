//! The durable record of which layout is in force: an fsynced log with compare-and-swap on (term, epoch).
//!
//! One machine needs no more; a lock keeps a second coordinator away. Every line carries its checksum, so a line
//! that a crash tore is the last one and is cut off; a damaged line before the end is an error, never skipped.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use infercluster_spec::{Epoch, Term};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// Longest log that is read: records are small, and one is written a migration.
const LOG_LIMIT: u64 = 256 << 20;

/// Why the store did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The file cannot be read or written.
    #[error("{} {}: {source}", what, file.display())]
    Io {
        /// What was done.
        what: &'static str,
        /// Which file.
        file: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Another coordinator holds it.
    #[error("{} is held by another coordinator", file.display())]
    Held {
        /// Which file.
        file: PathBuf,
    },
    /// A line that is not the last one is damaged.
    #[error("{}:{line} is damaged", file.display())]
    Damaged {
        /// Which file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
    },
    /// Longer than a log can be.
    #[error("{} has {length} bytes, the limit is {LOG_LIMIT}", file.display())]
    TooLong {
        /// Which file.
        file: PathBuf,
        /// Its length.
        length: u64,
    },
    /// Somebody else decided first.
    #[error("the record is of {}, {}, the swap expected {}, {}", found.term, found.epoch, expected.term, expected.epoch)]
    Conflict {
        /// What is there.
        found: Version,
        /// What was expected.
        expected: Version,
    },
    /// A swap that goes back.
    #[error("a record of {}, {} cannot follow {}, {}", next.term, next.epoch, found.term, found.epoch)]
    Backward {
        /// What is there.
        found: Version,
        /// What should follow.
        next: Version,
    },
}

/// What a swap compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Version {
    /// The coordinator's reign.
    pub term: Term,
    /// The layout version.
    pub epoch: Epoch,
}

/// One record of type `R` and its history.
#[derive(Debug)]
pub struct CommitLog<R> {
    path: PathBuf,
    file: File,
    current: Option<Entry<R>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry<R> {
    version: Version,
    record: R,
}

impl<R: Serialize + DeserializeOwned> CommitLog<R> {
    /// Opens or creates a log, takes its lock and reads the record in force.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|source| io_error("opening", path, source))?;
        lock(&file, path)?;
        let (current, length) = read_entries(&mut file, path)?;
        // A torn line at the end was never acknowledged.
        file.set_len(length)
            .and_then(|()| file.seek(SeekFrom::Start(length)))
            .map_err(|source| io_error("cutting", path, source))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            current,
        })
    }

    /// The version of the record in force; zeros where there is none.
    pub fn version(&self) -> Version {
        self.current
            .as_ref()
            .map_or_else(Version::default, |entry| entry.version)
    }

    /// The record in force.
    pub fn record(&self) -> Option<&R> {
        self.current.as_ref().map(|entry| &entry.record)
    }

    /// Makes a record durable if the one in force is of `expected`; when this returns it is on disk. A failed write
    /// leaves the record in force as it was.
    pub fn swap(&mut self, expected: Version, next: Version, record: R) -> Result<(), StoreError> {
        let found = self.version();
        if found != expected {
            return Err(StoreError::Conflict { found, expected });
        }
        if next <= found || next.epoch < found.epoch || next.term < found.term {
            return Err(StoreError::Backward { found, next });
        }
        let entry = Entry {
            version: next,
            record,
        };
        let line = line_of(&entry);
        let start = self.file.stream_position();
        let start = start.map_err(|source| io_error("asking for the end of", &self.path, source))?;
        let written = self
            .file
            .write_all(line.as_bytes())
            .and_then(|()| self.file.sync_data());
        if let Err(source) = written {
            // What was written of it is cut off; should that fail too, its checksum tells at the next start.
            let _ = self
                .file
                .set_len(start)
                .and_then(|()| self.file.seek(SeekFrom::Start(start)));
            return Err(io_error("writing", &self.path, source));
        }
        self.current = Some(entry);
        Ok(())
    }
}

fn io_error(what: &'static str, file: &Path, source: io::Error) -> StoreError {
    StoreError::Io {
        what,
        file: file.to_owned(),
        source,
    }
}

/// Takes the lock, which ends with the file handle.
fn lock(file: &File, path: &Path) -> Result<(), StoreError> {
    // SAFETY: `flock` has no memory effects, and the descriptor belongs to a live file.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::WouldBlock => Err(StoreError::Held {
            file: path.to_owned(),
        }),
        source => Err(io_error("locking", path, source)),
    }
}

/// `checksum json\n`, the checksum over the JSON.
fn line_of<R: Serialize>(entry: &Entry<R>) -> String {
    let json = serde_json::to_string(entry).expect("records are plain values");
    format!("{:016x} {json}\n", xxh3_64(json.as_bytes()))
}

/// The last entry and the length of what is whole.
fn read_entries<R: DeserializeOwned>(
    file: &mut File,
    path: &Path,
) -> Result<(Option<Entry<R>>, u64), StoreError> {
    let length = file
        .metadata()
        .map_err(|source| io_error("looking at", path, source))?
        .len();
    if length > LOG_LIMIT {
        return Err(StoreError::TooLong {
            file: path.to_owned(),
            length,
        });
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)
        .map_err(|source| io_error("reading", path, source))?;
    let (mut last, mut whole) = (None, 0);
    for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        match entry_of(line) {
            Some(entry) => {
                last = Some(entry);
                whole += line.len() as u64;
            }
            None if whole + line.len() as u64 == bytes.len() as u64 => break,
            None => {
                return Err(StoreError::Damaged {
                    file: path.to_owned(),
                    line: index + 1,
                });
            }
        }
    }
    Ok((last, whole))
}

fn entry_of<R: DeserializeOwned>(line: &[u8]) -> Option<Entry<R>> {
    let text = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let (checksum, json) = text.split_once(' ')?;
    let checksum = u64::from_str_radix(checksum, 16).ok()?;
    (checksum == xxh3_64(json.as_bytes())).then(|| serde_json::from_str(json).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(term: u64, epoch: u64) -> Version {
        Version {
            term: Term(term),
            epoch: Epoch(epoch),
        }
    }

    fn opened(path: &Path) -> CommitLog<String> {
        CommitLog::open(path).unwrap()
    }

    #[test]
    fn what_was_swapped_in_survives_and_nothing_else_does() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = opened(&path);
        assert_eq!((log.version(), log.record()), (version(0, 0), None));
        log.swap(version(0, 0), version(1, 1), "first".to_owned())
            .unwrap();
        let conflict = log.swap(version(0, 0), version(1, 2), "other".to_owned());
        assert!(matches!(conflict, Err(StoreError::Conflict { .. })));
        for backward in [version(1, 1), version(0, 2), version(2, 0)] {
            let refused = log.swap(version(1, 1), backward, "back".to_owned());
            assert!(
                matches!(refused, Err(StoreError::Backward { .. })),
                "{backward:?}"
            );
        }
        log.swap(version(1, 1), version(1, 2), "second".to_owned())
            .unwrap();
        drop(log);
        let log = opened(&path);
        assert_eq!(
            (log.version(), log.record().unwrap().as_str()),
            (version(1, 2), "second")
        );
    }

    #[test]
    fn a_torn_line_is_cut_at_every_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = opened(&path);
        log.swap(version(0, 0), version(1, 1), "kept".to_owned()).unwrap();
        drop(log);
        let whole = std::fs::read(&path).unwrap();
        let next = line_of(&Entry {
            version: version(1, 2),
            record: "torn".to_owned(),
        });
        for length in 0..next.len() {
            let mut bytes = whole.clone();
            bytes.extend_from_slice(&next.as_bytes()[..length]);
            std::fs::write(&path, &bytes).unwrap();
            let mut log = opened(&path);
            assert_eq!(log.record().unwrap(), "kept", "{length}");
            log.swap(version(1, 1), version(1, 2), "next".to_owned()).unwrap();
            drop(log);
            assert_eq!(opened(&path).record().unwrap(), "next", "{length}");
        }
    }

    #[test]
    fn damage_before_the_end_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = opened(&path);
        log.swap(version(0, 0), version(1, 1), "one".to_owned()).unwrap();
        log.swap(version(1, 1), version(1, 2), "two".to_owned()).unwrap();
        drop(log);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[30] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let error = CommitLog::<String>::open(&path).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { line: 1, .. }), "{error}");
    }

    #[test]
    fn two_coordinators_do_not_share_a_log() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let _log = opened(&path);
        assert!(matches!(
            CommitLog::<String>::open(&path),
            Err(StoreError::Held { .. })
        ));
    }
}
