//! The handshake: who dials, for what, and the proof that both belong to the same run and compute the same bits.
//!
//! A hello names the numerics profile that its sender computes in. A worker hears in its welcome how the model
//! turns positions, and its first control message carries the hash of the table that it makes of them.
//!
//! The acceptor reads one hello of at most 1 KiB and waits for it no longer than [`HANDSHAKE_DEADLINE`]. Anything else closes the
//! connection and changes nothing; where the peer speaks the protocol it hears the reason.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use infercluster_serving::handover::HandoverId;
use infercluster_spec::GpuId;
use infercluster_spec::model::{Llama3RopeScaling, Rope};
use serde::{Deserialize, Serialize};

use super::frame::Kind;
use super::{Connection, WireError};

/// How long each side waits for the other's word, and then for the rest of it.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// The widest head whose rotations are computed at another's word.
const HEAD_DIM_LIMIT: u32 = 1 << 14;
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
    /// The numerics profile that the dialer computes in.
    pub numerics: String,
}

/// How a model turns positions, in a form that postcard can carry.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rotations {
    theta: f64,
    llama3: Option<Llama3RopeScaling>,
    head_dim: u32,
}

impl Rotations {
    /// Those of a model's heads.
    pub fn new(rope: Rope, head_dim: u32) -> Self {
        Self {
            theta: rope.theta,
            llama3: rope.llama3,
            head_dim,
        }
    }

    /// The rotation.
    pub fn rope(&self) -> Rope {
        Rope {
            theta: self.theta,
            llama3: self.llama3,
        }
    }

    /// Width of a head.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }
}

/// What an acceptor demands of every peer, and tells those that are welcome.
#[derive(Debug, Clone)]
pub struct Admission {
    /// The secret of this run.
    pub token: Token,
    /// This run's numerics profile.
    pub numerics: String,
    /// What a worker has to agree on before it takes a seat; nothing among workers.
    pub rotations: Option<Rotations>,
}

/// Why an acceptor refuses a hello.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unwelcome {
    /// Another run, or an intruder.
    #[error("the token is not that of this run")]
    Token,
    /// Another set of bits.
    #[error("{gpu} computes in the numerics profile {found:?}, {expected:?} is asked for")]
    Numerics {
        /// The dialer's device.
        gpu: GpuId,
        /// The dialer's.
        found: String,
        /// The acceptor's.
        expected: String,
    },
    /// Rotations that differ in a bit: another library, or another version of this program.
    #[error("the RoPE table of {gpu} has hash {found:016x}, {expected:016x} is asked for")]
    Rotations {
        /// The dialer's device.
        gpu: GpuId,
        /// The dialer's.
        found: u64,
        /// The acceptor's.
        expected: u64,
    },
    /// Rotations that no model has.
    #[error("heads of {found} elements are wider than the limit of {limit}")]
    HeadDim {
        /// What was found.
        found: u32,
        /// The limit.
        limit: u32,
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

/// The acceptor's side: reads a hello, checks its token, asks `expected`, then compares the numerics profile. A
/// hello with the right token comes back with the verdict; the dialer has heard it.
pub fn accept(
    connection: &Connection,
    admission: &Admission,
    expected: impl FnOnce(&Hello) -> bool,
) -> Result<(Hello, Result<(), Unwelcome>), WireError> {
    let hello: Hello = match connection.receive(Kind::Hello, HANDSHAKE_DEADLINE) {
        Ok(hello) => hello,
        Err(error) => {
            match &error {
                WireError::Version { .. } => refuse(connection, &error.to_string()),
                _ => connection.close(),
            }
            return Err(error);
        }
    };
    if !hello.token.matches(&admission.token) {
        refuse(connection, &Unwelcome::Token.to_string());
        return Err(Unwelcome::Token.into());
    }
    let verdict = if !expected(&hello) {
        Err(Unwelcome::Unexpected {
            role: hello.role,
            gpu: hello.gpu,
            layout: hello.layout,
        })
    } else if hello.numerics != admission.numerics {
        Err(Unwelcome::Numerics {
            gpu: hello.gpu,
            found: hello.numerics.clone(),
            expected: admission.numerics.clone(),
        })
    } else {
        Ok(())
    };
    match &verdict {
        Ok(()) => connection.send(Kind::Welcome, &admission.rotations)?,
        Err(unwelcome) => refuse(connection, &unwelcome.to_string()),
    }
    Ok((hello, verdict))
}

/// The dialer's side; answers what a coordinator wants a worker to agree on.
pub fn introduce(connection: &Connection, hello: &Hello) -> Result<Option<Rotations>, WireError> {
    connection.send(Kind::Hello, hello)?;
    let rotations: Option<Rotations> = connection.receive(Kind::Welcome, HANDSHAKE_DEADLINE)?;
    match rotations {
        Some(Rotations { head_dim, .. }) if head_dim > HEAD_DIM_LIMIT => Err(Unwelcome::HeadDim {
            found: head_dim,
            limit: HEAD_DIM_LIMIT,
        }
        .into()),
        rotations => Ok(rotations),
    }
}

/// Says why a peer is not wanted, as far as it fits a frame, and ends the connection.
pub fn refuse(connection: &Connection, reason: &str) {
    let fits = reason.floor_char_boundary(Kind::Refused.limit() as usize);
    // The peer may be gone already; the refusal is a courtesy.
    let _ = connection.send_bytes(Kind::Refused, &reason.as_bytes()[..fits]);
    connection.close();
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use xxhash_rust::xxh3::xxh3_64;

    use super::*;
    use crate::wire::frame::{HEADER_BYTES, Header, VERSION};

    fn hello(token: &Token) -> Hello {
        Hello {
            token: token.clone(),
            role: Role::Worker,
            gpu: GpuId(3),
            layout: HandoverId(1),
            purpose: Purpose::Control,
            numerics: "seven/1".to_owned(),
        }
    }

    /// Runs an acceptor against what `dial` does with a raw socket.
    fn against<T: Send + 'static>(
        token: Token,
        dial: impl FnOnce(TcpStream) -> T + Send + 'static,
    ) -> (Result<Hello, WireError>, T) {
        let admission = Admission {
            token,
            numerics: "seven/1".to_owned(),
            rotations: Some(rotations(8)),
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let dialer = thread::spawn(move || dial(TcpStream::connect(address).unwrap()));
        let connection = Connection::new(listener.accept().unwrap().0).unwrap();
        let accepted = accept(&connection, &admission, |hello| hello.gpu == GpuId(3));
        let accepted = accepted.and_then(|(hello, verdict)| Ok(verdict.map(|()| hello)?));
        drop(connection);
        (accepted, dialer.join().unwrap())
    }

    fn rotations(head_dim: u32) -> Rotations {
        let llama3 = Llama3RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        };
        let rope = Rope {
            theta: 500_000.0,
            llama3: Some(llama3),
        };
        Rotations::new(rope, head_dim)
    }

    type Introduced = Result<Option<Rotations>, WireError>;

    fn dial(hello: Hello) -> impl FnOnce(TcpStream) -> Introduced + Send + 'static {
        move |stream| introduce(&Connection::new(stream).unwrap(), &hello)
    }

    #[test]
    fn the_right_token_is_welcome() {
        let token = Token::random().unwrap();
        let (accepted, introduced) = against(token.clone(), dial(hello(&token)));
        assert_eq!(accepted.unwrap().gpu, GpuId(3));
        assert_eq!(introduced.unwrap(), Some(rotations(8)));
    }

    #[test]
    fn a_head_of_any_width_is_not_computed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let dialer = thread::spawn(move || {
            dial(hello(&Token::random().unwrap()))(TcpStream::connect(address).unwrap())
        });
        let connection = Connection::new(listener.accept().unwrap().0).unwrap();
        let _hello: Hello = connection.receive(Kind::Hello, HANDSHAKE_DEADLINE).unwrap();
        connection
            .send(Kind::Welcome, &Some(rotations(u32::MAX)))
            .unwrap();
        let error = dialer.join().unwrap().unwrap_err();
        assert_eq!(
            error.to_string(),
            "heads of 4294967295 elements are wider than the limit of 16384"
        );
    }

    #[test]
    fn refusals_name_their_reason_on_both_sides() {
        let token = Token::random().unwrap();
        let other = Token::random().unwrap();
        let cases = [
            (hello(&other), "the token is not that of this run"),
            (
                Hello {
                    numerics: "eight\n".to_owned(),
                    ..hello(&token)
                },
                r#"gpu 3 computes in the numerics profile "eight\n", "seven/1" is asked for"#,
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
        assert!(
            text.contains("77") && text.contains(&format!("speaks {VERSION}")),
            "{text}"
        );
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
