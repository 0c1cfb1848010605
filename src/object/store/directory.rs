//! A store in a local directory: one file for each object.
//!
//! An object appears at once and complete: its bytes are written to a temporary file, the file is synchronized,
//! linked under its name, which fails if the name exists, and the directory is synchronized. A process that
//! crashes leaves at most temporary files, which the next one removes.
//!
//! A read from the first byte on synchronizes the directory. So what an opener has seen in the header of another
//! process' object is still there after a power failure, also if that process had not synchronized it yet.
//!
//! Operations run on threads of the store, since files block.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread;
use std::time::Duration;

use super::{Pending, Store, StoreError};

/// The threads of a store.
const THREADS: usize = 8;

/// The directory of temporary files. No object has a name below it.
const TEMPORARY: &str = "tmp";

/// The first wait before a retry, and the longest.
const BACK_OFF: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(5)];

type Job = Box<dyn FnOnce() + Send>;

/// A store in a local directory. Several processes may use the same directory at the same time.
pub struct Directory {
    root: Arc<Path>,
    temporary: AtomicU64,
    jobs: Mutex<Sender<Job>>,
}

impl Directory {
    /// Opens the store in a directory, which is created if it does not exist. Removes temporary files; another
    /// process that is just creating an object tries again then.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be created or written, or if no thread can be started.
    pub fn open(root: &Path) -> io::Result<Self> {
        make_directory(&root.join(TEMPORARY))?;
        for entry in fs::read_dir(root.join(TEMPORARY))? {
            match fs::remove_file(entry?.path()) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let (jobs, queue) = channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        for number in 0..THREADS {
            let queue = Arc::clone(&queue);
            thread::Builder::new().name(format!("store-{number}")).spawn(move || work(&queue))?;
        }
        Ok(Self { root: root.into(), temporary: AtomicU64::new(0), jobs: Mutex::new(jobs) })
    }

    /// Runs `job` on a thread of the store.
    fn run<'a, T: Send + 'static>(
        &self,
        job: impl FnOnce(&Path) -> T + Send + 'static,
    ) -> Pending<'a, T> {
        let answer = Arc::new(Mutex::new((None, None::<Waker>)));
        let (filled, root) = (Arc::clone(&answer), Arc::clone(&self.root));
        let job = move || {
            let result = job(&root);
            let mut answer = filled.lock().unwrap_or_else(PoisonError::into_inner);
            answer.0 = Some(result);
            if let Some(waker) = answer.1.take() {
                waker.wake();
            }
        };
        // The threads run as long as the sender exists, so the queue takes every job.
        let _ = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).send(Box::new(job));
        Box::pin(std::future::poll_fn(move |context| {
            let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
            match answer.0.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    answer.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        }))
    }
}

impl Store for Directory {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        let number = self.temporary.fetch_add(1, Ordering::Relaxed);
        let (name, bytes) = (name.to_owned(), bytes.to_owned());
        self.run(move |root| create(root, number, &name, &bytes).map_err(classify))
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        let name = name.to_owned();
        self.run(move |root| read(&root.join(name), range).map_err(classify))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        let (prefix, after) = (prefix.to_owned(), after.to_owned());
        self.run(move |root| list(root, prefix.trim_end_matches('/'), &after).map_err(classify))
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        let name = name.to_owned();
        self.run(move |root| match fs::remove_file(root.join(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(classify(error)),
            _ => Ok(()),
        })
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        let [first, longest] = BACK_OFF;
        let time = first.saturating_mul(1 << attempt.saturating_sub(1).min(16)).min(longest);
        #[allow(clippy::disallowed_methods, reason = "the thread has nothing else to do")]
        self.run(move |_| thread::sleep(time))
    }
}

/// Runs jobs until the store is dropped.
fn work(queue: &Mutex<Receiver<Job>>) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        job();
    }
}

fn create(root: &Path, number: u64, name: &str, bytes: &[u8]) -> io::Result<()> {
    let path = root.join(name);
    let directory = path.parent().ok_or(ErrorKind::InvalidInput)?;
    let temporary = root.join(TEMPORARY).join(format!("{}-{number}", std::process::id()));
    // A file of this name can only be left from a process that had the same number.
    let _ = fs::remove_file(&temporary);
    let mut file = OpenOptions::new().write(true).create_new(true).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_data()?;
    make_directory(directory)?;
    let linked = fs::hard_link(&temporary, &path);
    let _ = fs::remove_file(&temporary);
    linked?;
    synchronize(directory)
}

/// Creates a directory and the ones above it, so that they survive a power failure.
fn make_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let above = path.parent().ok_or(ErrorKind::NotFound)?;
            make_directory(above)?;
            return make_directory(path);
        }
        other => other?,
    }
    path.parent().map_or(Ok(()), synchronize)
}

fn synchronize(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

fn read(path: &Path, range: Range<u64>) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let length = file.metadata()?.len().min(range.end).saturating_sub(range.start);
    let mut bytes = vec![0; usize::try_from(length).map_err(|_| ErrorKind::InvalidInput)?];
    file.read_exact_at(&mut bytes, range.start)?;
    if range.start == 0 {
        path.parent().map_or(Ok(()), synchronize)?;
    }
    Ok(bytes)
}

/// Lists the names below `prefix` that are in the first directory with names behind `after`.
fn list(root: &Path, prefix: &str, after: &str) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(root.join(prefix)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let (mut names, mut directories) = (BTreeSet::new(), BTreeSet::new());
    for entry in entries {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = format!("{prefix}/{name}");
        match entry.file_type()?.is_dir() {
            true => directories.insert(name),
            false => names.insert(name),
        };
    }
    for directory in directories {
        // The names in it are greater than `directory/` and less than `directory0`.
        if format!("{directory}0").as_str() > after {
            let found = list(root, &directory, after)?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
    }
    Ok(names.into_iter().filter(|name| name.as_str() > after).collect())
}

fn classify(error: io::Error) -> StoreError {
    match error.kind() {
        ErrorKind::NotFound => StoreError::NotFound,
        ErrorKind::AlreadyExists => StoreError::Exists,
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            StoreError::Refused(error.to_string())
        }
        _ => StoreError::Unclear(error.to_string()),
    }
}
