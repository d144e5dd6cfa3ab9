//! The handshake: who dials, for what, and the proof that both belong to the same run.
//!
//! The acceptor reads one hello of at most 1 KiB within [`HANDSHAKE_DEADLINE`]. Anything else closes the
//! connection and changes nothing; where the peer speaks the protocol it hears the reason.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use infercluster_serving::handover::HandoverId;
use infercluster_spec::GpuId;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::frame::Kind;
use super::{Connection, WireError};

/// How long a whole handshake may take.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// The environment variable that carries the token to a worker; it never stands on a command line.
pub const TOKEN_VARIABLE: &str = "INFERCLUSTER_TOKEN";

/// The secret that the processes of one run share.
#[derive(Clone, Serialize, Deserialize)]
pub struct Token([u8; 32]);

impl Token {
    /// A new secret from the system's generator.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The text that goes into the environment.
    pub fn to_secret_text(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Compares in a time that does not depend on where the first difference is.
    pub fn matches(&self, other: &Self) -> bool {
        let difference = self
            .0
            .iter()
            .zip(&other.0)
            .fold(0_u8, |all, (mine, theirs)| all | (mine ^ theirs));
        std::hint::black_box(difference) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Token(secret)")
    }
}

/// A text that is no token. It does not repeat the text, which may be a mistyped secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a token is 64 hexadecimal digits, this text has {found} characters or other letters")]
pub struct TokenError {
    /// Characters found.
    pub found: usize,
}

impl FromStr for Token {
    type Err = TokenError;
    fn from_str(text: &str) -> Result<Self, TokenError> {
        let error = TokenError { found: text.len() };
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(error);
        }
        let value = |digit: u8| {
            char::from(digit)
                .to_digit(16)
                .map(|value| value as u8)
                .ok_or(error)
        };
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = value(pair[0])? << 4 | value(pair[1])?;
        }
        Ok(Self(bytes))
    }
}

/// Who dials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// Plans steps.
    Coordinator,
    /// Runs one device.
    Worker,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Purpose {
    /// Control messages between coordinator and worker.
    Control,
    /// Collectives of a tensor-parallel group.
    Collective,
    /// Activations from one stage to the next.
    Activations,
    /// KV on its way to a new layout.
    Kv,
}

/// What the dialer says first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Hello {
    /// The shared secret.
    pub token: Token,
    /// Who dials.
    pub role: Role,
    /// The dialer's device.
    pub gpu: GpuId,
    /// The layout that the connection serves, by the attempt that makes it: a second attempt at an epoch never
    /// meets connections of the first. Of no meaning on a control connection.
    pub layout: HandoverId,
    /// What the connection is for.
    pub purpose: Purpose,
    /// [`numerics_hash`] of the dialer's profile.
    pub numerics: u64,
}

/// Why an acceptor refuses a hello.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unwelcome {
    /// Another run, or an intruder.
    #[error("the token is not that of this run")]
    Token,
    /// Another set of bits.
    #[error("the numerics profile has hash {found:016x}, here it is {expected:016x}")]
    Numerics {
        /// The dialer's.
        found: u64,
        /// The acceptor's.
        expected: u64,
    },
    /// A device or role that nobody waits for here.
    #[error("no {role:?} connection of {gpu} for layout {} is expected here", layout.0)]
    Unexpected {
        /// Who dialed.
        role: Role,
        /// Its device.
        gpu: GpuId,
        /// Its layout.
        layout: HandoverId,
    },
}

/// The hash of a numerics profile's name.
pub fn numerics_hash(profile: &str) -> u64 {
    xxh3_64(profile.as_bytes())
}

/// The acceptor's side: reads a hello, checks token and numerics profile, then asks `expected`.
pub fn accept(
    connection: &Connection,
    token: &Token,
    numerics: u64,
    expected: impl FnOnce(&Hello) -> bool,
) -> Result<Hello, WireError> {
    let hello: Hello = match connection.receive(Kind::Hello, HANDSHAKE_DEADLINE) {
        Ok(hello) => hello,
        Err(error) => {
            if matches!(error, WireError::Version { .. }) {
                refuse(connection, &error.to_string());
            }
            connection.close();
            return Err(error);
        }
    };
    let verdict = if !hello.token.matches(token) {
        Err(Unwelcome::Token)
    } else if hello.numerics != numerics {
        Err(Unwelcome::Numerics {
            found: hello.numerics,
            expected: numerics,
        })
    } else if !expected(&hello) {
        Err(Unwelcome::Unexpected {
            role: hello.role,
            gpu: hello.gpu,
            layout: hello.layout,
        })
    } else {
        Ok(())
    };
    match verdict {
        Ok(()) => {
            connection.send_bytes(Kind::Welcome, &[])?;
            Ok(hello)
        }
        Err(unwelcome) => {
            refuse(connection, &unwelcome.to_string());
            connection.close();
            Err(unwelcome.into())
        }
    }
}

/// The dialer's side.
pub fn introduce(connection: &Connection, hello: &Hello) -> Result<(), WireError> {
    connection.send(Kind::Hello, hello)?;
    connection.receive::<()>(Kind::Welcome, HANDSHAKE_DEADLINE)
}

fn refuse(connection: &Connection, reason: &str) {
    // The peer may be gone already; the refusal is a courtesy.
    let _ = connection.send_bytes(Kind::Refused, reason.as_bytes());
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use super::*;
    use crate::wire::frame::{HEADER_BYTES, Header};

    fn hello(token: &Token) -> Hello {
        Hello {
            token: token.clone(),
            role: Role::Worker,
            gpu: GpuId(3),
            layout: HandoverId(1),
            purpose: Purpose::Control,
            numerics: 7,
        }
    }

    /// Runs an acceptor against what `dial` does with a raw socket.
    fn against<T: Send + 'static>(
        token: Token,
        dial: impl FnOnce(TcpStream) -> T + Send + 'static,
    ) -> (Result<Hello, WireError>, T) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let dialer = thread::spawn(move || dial(TcpStream::connect(address).unwrap()));
        let connection = Connection::new(listener.accept().unwrap().0).unwrap();
        let accepted = accept(&connection, &token, 7, |hello| hello.gpu == GpuId(3));
        drop(connection);
        (accepted, dialer.join().unwrap())
    }

    fn dial(hello: Hello) -> impl FnOnce(TcpStream) -> Result<(), WireError> + Send + 'static {
        move |stream| introduce(&Connection::new(stream).unwrap(), &hello)
    }

    #[test]
    fn the_right_token_is_welcome() {
        let token = Token::random().unwrap();
        let (accepted, introduced) = against(token.clone(), dial(hello(&token)));
        assert_eq!(accepted.unwrap().gpu, GpuId(3));
        introduced.unwrap();
    }

    #[test]
    fn refusals_name_their_reason_on_both_sides() {
        let token = Token::random().unwrap();
        let other = Token::random().unwrap();
        let cases = [
            (hello(&other), "the token is not that of this run"),
            (
                Hello {
                    numerics: 8,
                    ..hello(&token)
                },
                "the numerics profile has hash 0000000000000008",
            ),
            (
                Hello {
                    gpu: GpuId(9),
                    ..hello(&token)
                },
                "no Worker connection of gpu 9 for layout 1 is expected here",
            ),
        ];
        for (hello, reason) in cases {
            let (accepted, introduced) = against(token.clone(), dial(hello));
            assert!(accepted.unwrap_err().to_string().starts_with(reason));
            assert!(introduced.unwrap_err().to_string().contains(reason));
        }
    }

    #[test]
    fn another_version_hears_both_versions() {
        let token = Token::random().unwrap();
        let (accepted, reply) = against(token, |mut stream| {
            let mut frame = Header::of(Kind::Hello, 0, b"?").unwrap().encode();
            frame[4..6].copy_from_slice(&77_u16.to_le_bytes());
            stream.write_all(&frame).unwrap();
            stream.write_all(b"?").unwrap();
            let mut reply = Vec::new();
            // Bytes left unread by the acceptor may reset the connection after its reply.
            let _ = stream.read_to_end(&mut reply);
            reply
        });
        assert!(matches!(accepted, Err(WireError::Version { found: 77, .. })));
        let text = String::from_utf8_lossy(reply.get(HEADER_BYTES..).unwrap_or_default()).into_owned();
        assert!(text.contains("77") && text.contains("speaks 1"), "{text}");
    }

    #[test]
    fn random_bytes_change_nothing() {
        for seed in 0..32_u64 {
            let token = Token::random().unwrap();
            let noise: Vec<u8> = (0..200_u64)
                .flat_map(|i| xxh3_64(&(seed * 1_000 + i).to_le_bytes()).to_le_bytes())
                .collect();
            let (accepted, ()) = against(token, move |mut stream| {
                // The acceptor may close while this still writes.
                let _ = stream.write_all(&noise);
            });
            assert!(matches!(accepted, Err(WireError::Magic { .. })), "{accepted:?}");
        }
    }

    #[test]
    fn tokens_survive_their_text_and_hide_in_logs() {
        let token = Token::random().unwrap();
        let again: Token = token.to_secret_text().parse().unwrap();
        assert!(token.matches(&again));
        assert_eq!(format!("{token:?}"), "Token(secret)");
        for bad in ["", "zz", &"é".repeat(32)] {
            assert!(bad.parse::<Token>().is_err());
        }
    }
}
