//! What a file is that is none of those this program reads: people meet a web page where a download failed,
//! a pointer where a large file was not fetched, a compressed file that was not unpacked.

/// A kind of file that is often given by mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Foreign {
    /// What it is.
    pub(crate) what: &'static str,
    /// What to do about it.
    pub(crate) fix: &'static str,
}

const KINDS: [(&[u8], Foreign); 9] = [
    (
        b"version https://git-lfs",
        Foreign {
            what: "is a Git LFS pointer, not the file itself",
            fix: "fetch the file that it points to: git lfs pull",
        },
    ),
    (b"\xff\xfe", UTF_16),
    (b"\xfe\xff", UTF_16),
    (
        b"\x1f\x8b",
        Foreign {
            what: "is compressed with gzip",
            fix: "unpack it: gunzip FILE",
        },
    ),
    (
        b"\x28\xb5\x2f\xfd",
        Foreign {
            what: "is compressed with zstd",
            fix: "unpack it: unzstd FILE",
        },
    ),
    (
        b"\xfd7zXZ",
        Foreign {
            what: "is compressed with xz",
            fix: "unpack it: unxz FILE",
        },
    ),
    (
        b"PK\x03\x04",
        Foreign {
            what: "is a zip archive",
            fix: "unpack it and name the file inside",
        },
    ),
    (
        b"%PDF",
        Foreign {
            what: "is a PDF document",
            fix: "name the file with the text itself",
        },
    ),
    (
        b"\x89PNG",
        Foreign {
            what: "is a picture",
            fix: "paste the text that it shows into a file",
        },
    ),
];

const UTF_16: Foreign = Foreign {
    what: "is text in UTF-16",
    fix: "write it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE",
};

const WEB_PAGE: Foreign = Foreign {
    what: "is a web page",
    fix: "download the raw file instead of the page that shows it",
};

/// Recognises the start of a file; `None` for what may be one that this program reads.
pub(crate) fn recognise(start: &[u8]) -> Option<Foreign> {
    if let Some((_, kind)) = KINDS.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Some(*kind);
    }
    let text = start
        .strip_prefix(b"\xef\xbb\xbf")
        .unwrap_or(start)
        .trim_ascii_start();
    if text.starts_with(b"version https://git-lfs") {
        return Some(KINDS[0].1);
    }
    let head: Vec<u8> = text.iter().take(64).map(u8::to_ascii_lowercase).collect();
    let is_page = [&b"<!doctype html"[..], b"<html", b"<head", b"<body"]
        .iter()
        .any(|tag| head.starts_with(tag));
    if is_page {
        return Some(WEB_PAGE);
    }
    // UTF-16 without a mark: every other byte of plain letters is zero.
    let zeros = |first: usize| {
        start
            .iter()
            .take(64)
            .skip(first)
            .step_by(2)
            .filter(|byte| **byte == 0)
            .count()
    };
    let half = start.len().min(64) / 2;
    (half >= 4 && (zeros(0) == half) != (zeros(1) == half)).then_some(UTF_16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistaken_files_are_recognised_and_others_are_not() {
        let what = |start: &[u8]| recognise(start).map(|found| found.what);
        assert!(
            what(b"version https://git-lfs.github.com/spec/v1\noid").is_some_and(|what| what.contains("LFS"))
        );
        assert!(what(b"\xef\xbb\xbf \n<!DOCTYPE html>").is_some_and(|what| what.contains("web page")));
        assert!(what(b"\xff\xfe{\0}\0").is_some_and(|what| what.contains("UTF-16")));
        assert!(what(b"{\0\"\0a\0\"\0:\0 \0}\0").is_some_and(|what| what.contains("UTF-16")));
        assert!(what(b"\x1f\x8b\x08").is_some_and(|what| what.contains("gzip")));
        for text in [
            &b""[..],
            b"{}",
            b"<system version=\"1\">",
            b"GGUF\x03\0\0\0",
            b"a,b\n",
            b"\0\0\0\0\0\0\0\0",
        ] {
            assert_eq!(what(text), None, "{text:?}");
        }
    }
}
