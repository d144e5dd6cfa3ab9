//! `doctor`: what this host has, what is missing, and the fix.
//!
//! Libraries are looked up as files and never loaded: a look must not start a driver or change a device.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};

use clap::Args;
use infercluster_spec::Bytes;
use serde::Serialize;

use crate::Outcome;
use crate::screen::{Columns, Screen};

/// Shows what this host has for serving, what is missing, and the fix.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: infercluster doctor --json\n\nExits with 1 where something needed is missing."
)]
pub(crate) struct Doctor {}

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// Present and sufficient.
    Good,
    /// Absent or low; the CPU path works without it.
    Optional,
    /// Needed by every command that runs workers.
    Missing,
}

/// One look at the host.
#[derive(Debug, Serialize)]
struct Check {
    what: &'static str,
    verdict: Verdict,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl Check {
    fn good(what: &'static str, found: impl Into<String>) -> Self {
        Self {
            what,
            verdict: Verdict::Good,
            found: found.into(),
            fix: None,
        }
    }

    fn lacking(what: &'static str, verdict: Verdict, found: impl Into<String>, fix: &str) -> Self {
        Self {
            what,
            verdict,
            found: found.into(),
            fix: Some(fix.to_owned()),
        }
    }
}

#[derive(Debug, Serialize)]
struct Findings {
    checks: Vec<Check>,
}

/// Runs the command.
pub(crate) fn run(_: &Doctor, screen: &Screen) -> anyhow::Result<Outcome> {
    let findings = Findings {
        checks: vec![
            cpu(),
            cores(),
            memory(),
            loopback(),
            open_files(),
            devices(),
            library("CUDA driver", "libcuda.so", "install the NVIDIA driver"),
            library("cuBLAS", "libcublas.so", "install the CUDA toolkit's libcublas"),
            library("NCCL", "libnccl.so", "install libnccl2"),
        ],
    };
    screen.answer(&findings, people)?;
    let complete = findings
        .checks
        .iter()
        .all(|check| check.verdict != Verdict::Missing);
    Ok(if complete {
        Outcome::Done
    } else {
        Outcome::GoalNotMet
    })
}

fn people(findings: &Findings) -> String {
    let mut table = Columns::new(["check", "verdict", "found", "fix"]);
    for check in &findings.checks {
        let verdict = match check.verdict {
            Verdict::Good => "good",
            Verdict::Optional => "optional",
            Verdict::Missing => "MISSING",
        };
        table.row([
            check.what.to_owned(),
            verdict.to_owned(),
            check.found.clone(),
            check.fix.clone().unwrap_or_default(),
        ]);
    }
    table.to_string()
}

/// Vector units. Every kernel has a scalar form with the same bits, so none of them is needed.
fn cpu() -> Check {
    let features = cpu_features();
    let name = cpu_name();
    if features.is_empty() {
        return Check::lacking(
            "CPU",
            Verdict::Optional,
            format!("{name}, no vector unit that the kernels know"),
            "use a CPU with AVX2 and FMA for speed; the bits are the same",
        );
    }
    Check::good("CPU", format!("{name}, {}", features.join(" ")))
}

/// What the CPU calls itself.
pub(crate) fn cpu_name() -> String {
    fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<&'static str> {
    let all = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
    ];
    all.into_iter()
        .filter(|(_, has)| *has)
        .map(|(name, _)| name)
        .collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_features() -> Vec<&'static str> {
    Vec::new()
}

fn cores() -> Check {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores < 2 {
        return Check::lacking(
            "cores",
            Verdict::Optional,
            "1",
            "use 2 or more: workers that share a core pace each other",
        );
    }
    Check::good("cores", cores.to_string())
}

fn memory() -> Check {
    let Some(available) = available_memory() else {
        return Check::lacking(
            "memory",
            Verdict::Optional,
            "unknown",
            "this system does not say how much memory is free",
        );
    };
    if available < Bytes(2 << 30) {
        return Check::lacking(
            "memory",
            Verdict::Optional,
            format!("{available} free"),
            "free 2 GiB for the quickstart",
        );
    }
    Check::good("memory", format!("{available} free"))
}

/// Free memory of the host, or of the control group where that is less.
fn available_memory() -> Option<Bytes> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kibibytes: u64 = line.split_ascii_whitespace().nth(1)?.parse().ok()?;
    let host = Bytes(kibibytes.checked_mul(1024)?);
    let number = |path: &str| -> Option<u64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(limit, used)| Bytes(limit.saturating_sub(used)));
    Some(group.map_or(host, |group| host.min(group)))
}

/// Workers and coordinator talk over loopback.
fn loopback() -> Check {
    let connected = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| TcpStream::connect(listener.local_addr()?));
    match connected {
        Ok(_) => Check::good("loopback", "a TCP connection on 127.0.0.1 works"),
        Err(error) => Check::lacking(
            "loopback",
            Verdict::Missing,
            error.to_string(),
            "bring the loopback interface up (ip link set lo up)",
        ),
    }
}

/// Every stream of a client and every connection between workers is an open file.
fn open_files() -> Check {
    let limit = fs::read_to_string("/proc/self/limits").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("Max open files"))?;
        line.split_ascii_whitespace().nth(3)?.parse::<u64>().ok()
    });
    match limit {
        Some(limit) if limit < 1024 => Check::lacking(
            "open files",
            Verdict::Optional,
            limit.to_string(),
            "raise the limit (ulimit -n 4096): every client and worker connection takes one",
        ),
        Some(limit) => Check::good("open files", limit.to_string()),
        None => Check::good("open files", "no limit known"),
    }
}

fn devices() -> Check {
    let driver = fs::read_to_string("/proc/driver/nvidia/version")
        .ok()
        .and_then(|text| text.lines().next().map(str::to_owned));
    let count = fs::read_dir("/dev").map_or(0, |entries| {
        let is_device = |name: &str| {
            name.strip_prefix("nvidia")
                .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
        };
        entries
            .flatten()
            .filter(|entry| entry.file_name().to_str().is_some_and(is_device))
            .count()
    });
    match (count, driver) {
        (0, _) => Check::lacking(
            "NVIDIA devices",
            Verdict::Optional,
            "none",
            "none is needed: workers run on the CPU",
        ),
        (count, driver) => Check::good(
            "NVIDIA devices",
            format!("{count}, driver {}", driver.as_deref().unwrap_or("unknown")),
        ),
    }
}

fn library(what: &'static str, stem: &str, fix: &str) -> Check {
    match find_library(&library_folders(), stem) {
        Some(path) => Check::good(what, path.display().to_string()),
        None => Check::lacking(
            what,
            Verdict::Optional,
            format!("no {stem}* on the library path"),
            &format!("{fix}, on a host with GPUs"),
        ),
    }
}

/// Where the loader looks, in its order, as far as files tell.
fn library_folders() -> Vec<PathBuf> {
    let from_environment = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let standard = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
        "/usr/local/cuda/lib64",
        "/usr/local/nvidia/lib64",
    ];
    std::env::split_paths(&from_environment)
        .filter(|folder| !folder.as_os_str().is_empty())
        .chain(standard.map(PathBuf::from))
        .collect()
}

/// The first file whose name starts with `stem`, by folder and then by name.
fn find_library(folders: &[PathBuf], stem: &str) -> Option<PathBuf> {
    folders.iter().find_map(|folder| first_with_prefix(folder, stem))
}

fn first_with_prefix(folder: &Path, stem: &str) -> Option<PathBuf> {
    fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter(|entry| {
            entry
                .file_name()
                .to_str()
                .is_some_and(|name| name.starts_with(stem))
        })
        .map(|entry| entry.path())
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_by_folder_then_name() {
        let root = tempfile::tempdir().unwrap();
        let folders = ["first", "second"].map(|name| root.path().join(name));
        for folder in &folders {
            fs::create_dir(folder).unwrap();
        }
        fs::write(folders[1].join("libnccl.so.2.1"), "").unwrap();
        fs::write(folders[1].join("libnccl.so.2"), "").unwrap();
        let found = find_library(&folders, "libnccl.so");
        assert_eq!(found, Some(folders[1].join("libnccl.so.2")));
        assert_eq!(find_library(&folders, "libcuda.so"), None);
    }
}
