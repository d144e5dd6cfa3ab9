//! Files in and out: every input has a limit, `-` is standard input or output, and errors name the file.

use std::fs::File;
use std::io::{Read, Write as _};
use std::path::Path;

use anyhow::{Context as _, anyhow, bail};
use infercluster_spec::{Bytes, Document, json};

use crate::failure::WithFix as _;
use crate::{foreign, screen};

/// Largest document, configuration or layout that is read: far above any real one.
pub(crate) const DOCUMENT_LIMIT: Bytes = Bytes(64 << 20);

/// The name that messages use for an input.
pub(crate) fn name_of(path: &Path) -> String {
    if is_standard(path) {
        "standard input".to_owned()
    } else {
        path.display().to_string()
    }
}

fn is_standard(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Reads a text of at most `limit` bytes from a file or, for `-`, from standard input.
pub(crate) fn read_text(path: &Path, limit: Bytes) -> anyhow::Result<String> {
    let bytes = read_bytes(path, limit)?;
    text_of(bytes).with_context(|| name_of(path))
}

/// Reads at most `limit` bytes, whatever they are.
pub(crate) fn read_bytes(path: &Path, limit: Bytes) -> anyhow::Result<Vec<u8>> {
    let name = name_of(path);
    if path.is_dir() {
        bail!("{name} is a directory, a file is needed");
    }
    let bytes = if is_standard(path) {
        read_limited(std::io::stdin().lock(), limit)
    } else {
        let file = File::open(path)
            .with_context(|| name.clone())
            .fix("name a file that exists and can be read, or - for standard input")?;
        read_limited(file, limit)
    };
    bytes.with_context(|| name)
}

fn read_limited(source: impl Read, limit: Bytes) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(limit.0.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit.0 {
        bail!("has more than {limit}, which is the limit for this kind of file");
    }
    Ok(bytes)
}

fn text_of(bytes: Vec<u8>) -> anyhow::Result<String> {
    if let Some(foreign) = foreign::recognise(&bytes) {
        return Err(anyhow!(foreign.what)).fix(foreign.fix);
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow!("is no UTF-8 text (byte {at})")
    })
}

/// Reads a document.
pub(crate) fn read_document<T: Document>(path: &Path) -> anyhow::Result<T> {
    let text = read_text(path, DOCUMENT_LIMIT)?;
    Ok(json::read(&name_of(path), &text)?)
}

/// Writes bytes to a file (whole or not at all) or, for `-`, to standard output.
pub(crate) fn write_bytes(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if is_standard(path) {
        return screen::to_stdout(bytes);
    }
    write_to(path, bytes).with_context(|| path.display().to_string())
}

fn write_to(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    // A link stays a link, and what it names is written.
    let target = std::fs::canonicalize(path)
        .or_else(|_| std::fs::read_link(path).map(|named| path.with_file_name(named)))
        .unwrap_or_else(|_| path.to_owned());
    if target.is_dir() {
        bail!("is a directory, a file is needed");
    }
    // A device or a pipe is written and never replaced by a file.
    if std::fs::metadata(&target).is_ok_and(|found| !found.is_file()) {
        let mut file = File::options().write(true).open(&target)?;
        return Ok(file.write_all(bytes)?);
    }
    let folder = target
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    if !folder.is_dir() {
        let refused = Err(anyhow!("there is no folder {}", folder.display()));
        return refused.fix("make the folder, or name a file in one that exists");
    }
    replace(folder, &target, bytes)
}

fn replace(folder: &Path, path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut file = tempfile::Builder::new()
        .prefix(".infercluster-")
        .permissions(shared_permissions())
        .tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

/// Temporary files are private by default; a result is as readable as any other new file.
fn shared_permissions() -> std::fs::Permissions {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::Permissions::from_mode(0o644)
}

/// Writes a document to a file or, for `-`, to standard output.
pub(crate) fn write_document<T: Document>(path: &Path, document: &T) -> anyhow::Result<()> {
    write_bytes(path, json::write(document).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_past_its_limit_is_refused() {
        let at_limit = read_limited(&b"12345678"[..], Bytes(8)).unwrap();
        assert_eq!(at_limit, b"12345678");
        let error = read_limited(&b"123456789"[..], Bytes(8)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "has more than 8 B, which is the limit for this kind of file"
        );
    }

    #[test]
    fn a_written_file_is_whole_and_readable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write_bytes(&path, b"one").unwrap();
        write_bytes(&path, b"two").unwrap();
        assert_eq!(read_text(&path, Bytes(10)).unwrap(), "two");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn links_devices_and_folders_stay_what_they_are() {
        use std::os::unix::fs::FileTypeExt as _;
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("a.json"), folder.path().join("link"));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for text in ["one", "two"] {
            write_bytes(&link, text.as_bytes()).unwrap();
            assert_eq!(read_text(&path, Bytes(10)).unwrap(), text);
        }
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());

        // Through a link, so that a mistake replaces nothing outside this folder.
        let device = folder.path().join("device");
        std::os::unix::fs::symlink("/dev/full", &device).unwrap();
        let error = write_bytes(&device, b"one").unwrap_err();
        assert!(chain(&error).contains("No space left"), "{error:#}");
        let found = std::fs::metadata("/dev/full").unwrap();
        assert!(found.file_type().is_char_device());

        let cases = [
            (folder.path().to_owned(), "is a directory"),
            (folder.path().join("absent/a.json"), "there is no folder"),
        ];
        for (path, expected) in cases {
            let error = write_bytes(&path, b"one").unwrap_err();
            assert!(chain(&error).contains(expected), "{error:#}");
        }
    }

    fn chain(error: &anyhow::Error) -> String {
        crate::failure::message(error)
    }
}
