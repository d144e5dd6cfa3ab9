//! The HTTP socket: a peer that says nothing, or takes nothing, is closed, and there are never more connections than
//! the process has files for.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// How long accepting rests after a failure: out of files or the like, others need time to give some back.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Connections at once, whatever the process may open.
const MOST_CONNECTIONS: usize = 4096;

/// What is granted to the peers of a socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// How long the head of a request may take, counted from the connection or from the last answer.
    pub(super) head: Duration,
    /// How long bytes may wait for a peer to take them.
    pub(super) unsent: Duration,
    /// Connections at once; later ones wait until one ends.
    pub(super) connections: usize,
}

impl Patience {
    /// What suits a service: half of the files that this process may open, for the other half belongs to workers.
    pub(super) fn of_this_process() -> Self {
        Self {
            head: Duration::from_secs(30),
            unsent: Duration::from_secs(60),
            connections: (open_file_limit() / 2).clamp(16, MOST_CONNECTIONS),
        }
    }
}

/// Answers on a socket until the future is dropped; connections that are open then end with the runtime.
pub(super) async fn serve(listener: TcpListener, routes: Router, patience: Patience) {
    let places = Arc::new(Semaphore::new(patience.connections));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, peer)) => {
                let answering = answer(stream, peer, routes.clone(), patience);
                tokio::spawn(async move {
                    answering.await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!("accepting an HTTP connection failed: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// One connection to its end.
async fn answer(stream: TcpStream, peer: SocketAddr, routes: Router, patience: Patience) {
    if let Err(error) = tune(&stream, patience.unsent) {
        tracing::debug!("HTTP connection of {peer} closed: {error}");
        return;
    }
    let routes = routes.layer(Extension(ConnectInfo(peer)));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience.head)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    if let Err(error) = connection.await {
        tracing::debug!("HTTP connection of {peer} ended: {error}");
    }
}

/// Tokens leave at once, and a peer that takes nothing for `unsent` is given up.
fn tune(stream: &TcpStream, unsent: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let limit = libc::c_uint::try_from(unsent.as_millis()).unwrap_or(libc::c_uint::MAX);
    // SAFETY: the descriptor is that of `stream`, which outlives the call, and the option's value is the integer that
    // the pointer and the length name.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_USER_TIMEOUT,
            std::ptr::from_ref(&limit).cast(),
            size_of_val(&limit) as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Files that this process may have open at once; a common default where the system does not say.
fn open_file_limit() -> usize {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a plain C struct that outlives the call, and the kernel fills it in.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    if result == 0 {
        usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX)
    } else {
        1024
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use axum::routing::get;

    use super::*;

    #[test]
    fn silent_peers_are_closed_and_give_their_places_back() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let patience = Patience {
            head: Duration::from_millis(100),
            unsent: Duration::from_secs(60),
            connections: 2,
        };
        let peer = |ConnectInfo(peer): ConnectInfo<SocketAddr>| async move { peer.port().to_string() };
        runtime.spawn(serve(listener, Router::new().route("/", get(peer)), patience));
        let connect = |begin: &[u8]| {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            stream.write_all(begin).unwrap();
            stream
        };
        // Both places go to peers that never finish a request; the third waits and is answered.
        let mut silent = [connect(b""), connect(b"GET / HTTP/1.1\r\nhost: a\r\nx-slow: ")];
        let mut third = connect(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
        let mut answer = String::new();
        third.read_to_string(&mut answer).unwrap();
        let port = third.local_addr().unwrap().port().to_string();
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.ends_with(&port),
            "{answer}"
        );
        for stream in &mut silent {
            // Closed, with an answer or without one.
            stream.read_to_end(&mut Vec::new()).unwrap();
        }
    }
}
