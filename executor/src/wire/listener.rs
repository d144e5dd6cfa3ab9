//! Accepts connections and hands on those whose handshake held.
//!
//! Every handshake runs on a thread of its own, so that a peer that says nothing delays nobody, and at most
//! [`PENDING_LIMIT`] of them run at once. A peer that fails is logged in one line and changes nothing.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::handshake::{self, Admission, Hello, Unwelcome};
use super::{Connection, WireError};

/// Handshakes that may be under way at once.
const PENDING_LIMIT: usize = 64;
/// How long accepting rests after a failure.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// A listening socket with its thread; dropping it ends both.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    socket: Arc<TcpListener>,
    closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens on a free port. `expected` says whether a hello with the right token belongs here, `admit` takes
    /// what passed, and hears of those that had the token and were refused.
    pub fn start(
        bind: IpAddr,
        admission: Admission,
        expected: impl Fn(&Hello) -> bool + Send + Sync + 'static,
        admit: impl Fn(Hello, Result<Connection, Unwelcome>) + Send + Sync + 'static,
    ) -> Result<Self, WireError> {
        let io = |what| move |source| WireError::Io { what, source };
        let socket = Arc::new(TcpListener::bind((bind, 0)).map_err(io("binding a listener"))?);
        let address = socket
            .local_addr()
            .map_err(io("asking for a listener's address"))?;
        let closing = Arc::new(AtomicBool::new(false));
        let gate = Arc::new(Gate {
            admission,
            pending: AtomicUsize::new(0),
            flooded: AtomicBool::new(false),
            expected: Box::new(expected),
            admit: Box::new(admit),
        });
        let (accepting, stop) = (Arc::clone(&socket), Arc::clone(&closing));
        let thread = thread::Builder::new()
            .name("accept".to_owned())
            .spawn(move || accept_loop(&accepting, &stop, &gate))
            .map_err(io("starting a thread"))?;
        Ok(Self {
            address,
            socket,
            closing,
            thread: Some(thread),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Release);
        // SAFETY: the descriptor belongs to `self.socket`, which lives until after this call. Shutting a listening
        // socket down makes a blocked accept return, and does nothing else.
        unsafe {
            libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR);
        }
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was already printed, and there is nothing left to do here.
            let _ = thread.join();
        }
    }
}

struct Gate {
    admission: Admission,
    pending: AtomicUsize,
    /// Whether it was said that there is no place: a flood of strangers is one line, not one each.
    flooded: AtomicBool,
    expected: Box<dyn Fn(&Hello) -> bool + Send + Sync>,
    admit: Box<dyn Fn(Hello, Result<Connection, Unwelcome>) + Send + Sync>,
}

fn accept_loop(socket: &TcpListener, closing: &AtomicBool, gate: &Arc<Gate>) {
    loop {
        let accepted = socket.accept();
        if closing.load(Ordering::Acquire) {
            return;
        }
        match accepted {
            Ok((stream, peer)) => gate_keep(gate, stream, peer),
            Err(error) => {
                tracing::warn!("accepting a connection failed: {error}");
                // Out of descriptors or the like: others need time to give some back.
                thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn gate_keep(gate: &Arc<Gate>, stream: TcpStream, peer: SocketAddr) {
    if gate.pending.fetch_add(1, Ordering::AcqRel) >= PENDING_LIMIT {
        gate.pending.fetch_sub(1, Ordering::AcqRel);
        if !gate.flooded.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                "connections are closed, that from {peer} first: {PENDING_LIMIT} handshakes are under way already"
            );
        }
        return;
    }
    gate.flooded.store(false, Ordering::Release);
    let keeper = Arc::clone(gate);
    let spawned = thread::Builder::new()
        .name("handshake".to_owned())
        .spawn(move || {
            let outcome = shake(&keeper, stream);
            keeper.pending.fetch_sub(1, Ordering::AcqRel);
            match outcome {
                Ok((hello, admitted)) => {
                    if let Err(unwelcome) = &admitted {
                        tracing::warn!("connection from {peer} closed: {unwelcome}");
                    }
                    (keeper.admit)(hello, admitted);
                }
                Err(error) => tracing::warn!("connection from {peer} closed: {error}"),
            }
        });
    if let Err(error) = spawned {
        gate.pending.fetch_sub(1, Ordering::AcqRel);
        tracing::warn!("connection from {peer} closed: starting a thread failed: {error}");
    }
}

fn shake(gate: &Gate, stream: TcpStream) -> Result<(Hello, Result<Connection, Unwelcome>), WireError> {
    let connection = Connection::new(stream)?;
    let (hello, verdict) = handshake::accept(&connection, &gate.admission, &gate.expected)?;
    Ok((hello, verdict.map(|()| connection)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::Ipv4Addr;
    use std::sync::mpsc;

    use infercluster_serving::handover::HandoverId;
    use infercluster_spec::GpuId;

    use super::*;
    use crate::wire::{Purpose, Role, Token};

    #[test]
    fn strangers_are_closed_and_members_still_pass() {
        let token = Token::random().unwrap();
        let admission = Admission {
            token: token.clone(),
            numerics: "one/1".to_owned(),
            rotations: None,
        };
        let (admitted, arrivals) = mpsc::channel();
        let listener = Listener::start(
            Ipv4Addr::LOCALHOST.into(),
            admission,
            |_| true,
            move |hello, connection| admitted.send((hello.gpu, connection.is_ok())).unwrap(),
        )
        .unwrap();
        // One peer says nothing for the whole test, one sends noise and is closed.
        let _silent = TcpStream::connect(listener.address()).unwrap();
        let mut noisy = TcpStream::connect(listener.address()).unwrap();
        noisy.write_all(&[0x5a; 4096]).unwrap();
        noisy.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let closed = noisy.read(&mut [0; 1]);
        assert!(
            matches!(&closed, Ok(0))
                || closed.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
        );

        let mut hello = Hello {
            token,
            role: Role::Worker,
            gpu: GpuId(4),
            layout: HandoverId(0),
            purpose: Purpose::Control,
            numerics: "two/1".to_owned(),
        };
        for (numerics, welcome) in [("two/1", false), ("one/1", true)] {
            hello.numerics = numerics.to_owned();
            let member = Connection::dial(listener.address(), Duration::from_secs(10)).unwrap();
            assert_eq!(handshake::introduce(&member, &hello).is_ok(), welcome);
            let heard = arrivals.recv_timeout(Duration::from_secs(10));
            assert_eq!(heard, Ok((GpuId(4), welcome)));
        }
        drop(listener);
        assert!(arrivals.try_recv().is_err(), "nobody else was admitted");
    }
}
