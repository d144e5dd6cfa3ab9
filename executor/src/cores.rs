//! Threads kept on cores of their own.
//!
//! A thread that waits for a peer in every layer is moved by the kernel whenever its core has other work at the
//! moment it wakes, and two computing threads then share one core for milliseconds while another idles.

use std::io;
use std::sync::LazyLock;

/// Cores that this process may use, whatever single threads of it are kept on; at least 1.
pub fn of_this_process() -> usize {
    static CORES: LazyLock<usize> = LazyLock::new(|| {
        let main_thread = libc::pid_t::try_from(std::process::id()).unwrap_or(0);
        let allowed = allowed(main_thread).unwrap_or_else(|_| empty());
        cores(&allowed).count().max(1)
    });
    *CORES
}

/// Keeps the calling thread on one core: the `index`-th of those that it may use. Answers `false`, and leaves the
/// thread where it is, where there are fewer.
pub fn pin_this_thread(index: usize) -> io::Result<bool> {
    let allowed = allowed(0)?;
    let Some(core) = cores(&allowed).nth(index) else {
        return Ok(false);
    };
    let mut one = empty();
    // SAFETY: the number is below the size of a set.
    unsafe { libc::CPU_SET(core, &mut one) };
    // SAFETY: the call reads the size that it is given, from a set that lives as long, and changes where the
    // calling thread may run.
    let answer = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const one) };
    if answer == 0 {
        Ok(true)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Where a thread may run; 0 is the calling one.
fn allowed(thread: libc::pid_t) -> io::Result<libc::cpu_set_t> {
    let mut allowed = empty();
    // SAFETY: the call writes at most the size that it is given, into a set that lives as long.
    let answer = unsafe { libc::sched_getaffinity(thread, size_of::<libc::cpu_set_t>(), &raw mut allowed) };
    if answer == 0 {
        Ok(allowed)
    } else {
        Err(io::Error::last_os_error())
    }
}

fn cores(set: &libc::cpu_set_t) -> impl Iterator<Item = usize> {
    // SAFETY: the number is below the size of a set.
    (0..libc::CPU_SETSIZE as usize).filter(|core| unsafe { libc::CPU_ISSET(*core, set) })
}

fn empty() -> libc::cpu_set_t {
    // SAFETY: a set is plain data, and all zeros is the empty one.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_on_one_core_or_where_it_was() {
        let cores = || std::thread::available_parallelism().map_or(0, usize::from);
        let all = of_this_process();
        std::thread::spawn(move || {
            let before = cores();
            assert!(!pin_this_thread(libc::CPU_SETSIZE as usize).unwrap());
            assert_eq!(cores(), before);
            assert!(pin_this_thread(0).unwrap());
            assert_eq!((cores(), of_this_process()), (1, all));
        })
        .join()
        .unwrap();
    }
}
