//! Files compressed with gzip, unpacked as they are read. A small file that unpacks to a huge one is refused
//! once it has unpacked to far more than real traces do.

use std::io::{self, Read};

use flate2::read::MultiGzDecoder;

/// First bytes of the format.
pub(crate) const MAGIC: &[u8] = b"\x1f\x8b";
/// Text of numbers packs ten- to thirtyfold.
const RATIO_LIMIT: u64 = 200;
/// Whatever the ratio, this much may come out.
const FREE_BYTES: u64 = 16 << 20;

/// What comes out of a compressed source, up to the limit.
pub(crate) struct Unpacked<R> {
    decoder: MultiGzDecoder<Counted<R>>,
    out: u64,
}

struct Counted<R> {
    inner: R,
    read: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.read += read as u64;
        Ok(read)
    }
}

impl<R: Read> Unpacked<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self {
            decoder: MultiGzDecoder::new(Counted { inner, read: 0 }),
            out: 0,
        }
    }
}

impl<R: Read> Read for Unpacked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.decoder.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                io::Error::new(error.kind(), "the compressed file is cut off: download it again")
            }
            _ => io::Error::new(error.kind(), format!("the compressed file is damaged ({error})")),
        })?;
        self.out += read as u64;
        let packed = self.decoder.get_ref().read;
        if self.out > FREE_BYTES.saturating_add(packed.saturating_mul(RATIO_LIMIT)) {
            let message = format!(
                "{packed} compressed bytes hold more than {} bytes, which no trace does: unpack it yourself",
                self.out
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(read)
    }
}
