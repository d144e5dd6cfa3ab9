//! The record log on a thread of its own: an entry is synced while steps run, and the engine hears when it is
//! durable.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use infercluster_serving::handover::{HandoverId, Record};
use infercluster_spec::Term;

use super::engine::Event;
use super::error::ExecutorError;
use crate::clock;
use crate::store::{RecordLog, StoreError};

static NEXT_FOLDER: AtomicU64 = AtomicU64::new(0);

/// What the engine asks for; the answer is [`Event::Recorded`].
enum Request {
    Swap(Record),
    TakeTerm(Term),
}

/// What the log answers.
#[derive(Debug)]
pub(super) enum Recorded {
    /// The record that made this layout is durable.
    Swapped(HandoverId),
    /// A term was taken; this is the record that holds in it.
    Term { term: Term, record: Record },
}

/// The writing end.
#[derive(Debug)]
pub(super) struct Records {
    requests: Sender<Request>,
    /// How long the first entries took to become durable.
    pub(super) write_time: Duration,
    _folder: Option<OwnFolder>,
}

/// A folder that goes with the service.
#[derive(Debug)]
struct OwnFolder(PathBuf);

impl Drop for OwnFolder {
    fn drop(&mut self) {
        // What cannot be removed is a small file in the system's temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A reign that has begun.
pub(super) struct Reign {
    pub(super) records: Records,
    pub(super) record: Record,
}

impl Records {
    /// Takes a term and puts the first layout in force, with the log in `folder` or one that ends with the
    /// service. `first` makes the record of a term and an epoch.
    pub(super) fn begin(
        folder: Option<&Path>,
        events: &Sender<Event>,
        first: impl FnOnce(Term, infercluster_spec::Epoch) -> Record,
    ) -> Result<Reign, ExecutorError> {
        let own = folder.is_none().then(|| {
            let number = NEXT_FOLDER.fetch_add(1, Ordering::Relaxed);
            let name = format!("infercluster-{}-{number}", std::process::id());
            OwnFolder(std::env::temp_dir().join(name))
        });
        let folder = folder.map_or_else(
            || own.as_ref().map(|own| own.0.clone()),
            |path| Some(path.to_owned()),
        );
        let folder = folder.unwrap_or_default();
        let mut log = RecordLog::open(&folder)?;
        let started = clock::now();
        let term = log.take_term(Term(0))?;
        let record = first(term, log.next_epoch());
        log.swap(&record)?;
        let write_time = started.elapsed() / 2;
        let (requests, queue) = mpsc::channel();
        let events = events.clone();
        thread::Builder::new()
            .name("records".to_owned())
            .spawn(move || serve(log, &queue, &events))
            .map_err(|source| ExecutorError::Thread { source })?;
        Ok(Reign {
            records: Self {
                requests,
                write_time,
                _folder: own,
            },
            record,
        })
    }

    /// Asks for a record to be put in force.
    pub(super) fn swap(&self, record: Record) {
        self.ask(Request::Swap(record));
    }

    /// Asks for a higher term.
    pub(super) fn take_term(&self, above: Term) {
        self.ask(Request::TakeTerm(above));
    }

    fn ask(&self, request: Request) {
        let asked = self.requests.send(request);
        assert!(
            asked.is_ok(),
            "the record thread ends with the engine and not before"
        );
    }
}

fn serve(mut log: RecordLog, requests: &Receiver<Request>, events: &Sender<Event>) {
    while let Ok(request) = requests.recv() {
        let answer = match request {
            Request::Swap(record) => log.swap(&record).map(|()| Recorded::Swapped(record.layout)),
            Request::TakeTerm(above) => take_term(&mut log, above),
        };
        if events.send(Event::Recorded(answer)).is_err() {
            return;
        }
    }
}

fn take_term(log: &mut RecordLog, above: Term) -> Result<Recorded, StoreError> {
    let term = log.take_term(above)?;
    let record = log.record().cloned().expect("a reign begins with a record");
    Ok(Recorded::Term { term, record })
}
