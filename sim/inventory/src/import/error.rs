//! Why a dump could not be read at all, and what its owner can do about it.

/// Why nothing of a dump was read. Every message names the file; [`ImportError::fix`] says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// No reader knows it.
    #[error("{file}: no known kind of dump, it starts with `{starts}`")]
    UnknownKind {
        /// Which file.
        file: String,
        /// Its first words.
        starts: String,
    },
    /// Nothing but white space.
    #[error("{file}: the file is empty")]
    Empty {
        /// Which file.
        file: String,
    },
    /// Longer than any dump.
    #[error("{file}: the file has {found} bytes, a dump has at most {limit}")]
    TooLong {
        /// Which file.
        file: String,
        /// Its length, or one more than the limit where reading stopped there.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// Text in an encoding of two or four bytes a letter.
    #[error("{file}: the text is {encoding}, not UTF-8")]
    WideText {
        /// Which file.
        file: String,
        /// Which encoding.
        encoding: &'static str,
    },
    /// Not text.
    #[error("{file}: byte {offset} is zero, so this is {what}, not text")]
    Binary {
        /// Which file.
        file: String,
        /// Where the first zero byte stands.
        offset: usize,
        /// What it looks like.
        what: &'static str,
    },
    /// A web page around the dump.
    #[error("{file}: this is an HTML page, not the dump itself")]
    Html {
        /// Which file.
        file: String,
    },
    /// What Git keeps in place of a large file.
    #[error("{file}: this is a Git LFS pointer, not the file that it stands for")]
    LfsPointer {
        /// Which file.
        file: String,
    },
    /// Something that grows when it is read.
    #[error("{file}:{line}: {what} are not read, since they may grow without limit")]
    Growing {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Entities or aliases.
        what: &'static str,
    },
    /// Nested deeper than any dump.
    #[error("{file}:{line}: nested deeper than {limit} levels")]
    TooDeep {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// The limit.
        limit: usize,
    },
    /// More of something than any cluster has.
    #[error("{file}:{line}: more than {limit} {what}")]
    TooMany {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// What is counted.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// A PCI device that lies below itself.
    #[error("{file}:{line}: PCI device {bus} lies below itself, first named in line {first}")]
    Loop {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// The device.
        bus: String,
        /// Where it stands first.
        first: usize,
    },
    /// Markup or data of no known tool, or none at all.
    #[error("{file}:{line}: this is {format} of no known tool: {found}")]
    UnknownDocument {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// XML, JSON or YAML.
        format: &'static str,
        /// What was found.
        found: String,
    },
}

impl ImportError {
    /// What to do about it.
    pub fn fix(&self) -> &'static str {
        match self {
            Self::UnknownKind { .. } | Self::UnknownDocument { .. } => {
                "give the output of nvidia-smi (topo -m, -L, -q -x, nvlink -s, --query-gpu), an NCCL topology \
                 XML, nccl-tests, nvbandwidth, ibstat, ibv_devinfo, sinfo, scontrol show node, kubectl get node \
                 -o yaml, GPU feature labels, ray status or a worker's JSON"
            }
            Self::Empty { .. } => "run the command again and save what it prints",
            Self::TooLong { .. } => "give the output of one command, or of fewer nodes at a time",
            Self::WideText { .. } => {
                "convert it first: iconv -f UTF-16 -t UTF-8 FILE > NEW (PowerShell: Out-File -Encoding utf8)"
            }
            Self::Binary { .. } => "give the text that the command prints, unpacked",
            Self::Html { .. } => "save the dump as plain text (the raw view of the page), not the page",
            Self::LfsPointer { .. } => "fetch the file itself: git lfs pull",
            Self::Growing { .. } => "write the values out in full",
            Self::TooDeep { .. } => "give the file as the tool wrote it",
            Self::TooMany { .. } => "check the range or count there, or import fewer nodes at a time",
            Self::Loop { .. } => "dump the topology again, or remove the device that is its own parent",
        }
    }
}
