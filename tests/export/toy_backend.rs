//! A backend that exists only in this file. It shows that a new backend needs its own code and one line in a
//! registry: no other code has a `match` arm, a list or a name that belongs to a backend.

use std::fs::File;
use std::io::{Seek, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cleat_backend::claimant::Claimant;
use cleat_backend::fence::{Client, Fence, Target};
use cleat_backend::uri::{Options, Size, invalid, parse_size};
use cleat_backend::{
    Backend, Completer, Confinement, CredentialFile, CredentialSet, HandoverFiles, Image,
    ImageQueue, Nested, Network, OpenOptions, Outcome, Registry, RenewCredentials, RequestId,
    Started, VolumeIdentity, VolumeSpec,
};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::request::{IoError, Op, Request};
use cleat_core::volume::{BlockSizes, Features};
use cleat_export::server::Limits;
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};
use test_kit::nbd::wire;

use super::fixture::Fixture;

/// The registration. The composition of a program has the same line for each of its backends.
static REGISTRY: Registry = Registry::new(&[&Toy]);

/// `toy:SIZE`: bytes that a mutex protects.
struct Toy;

impl Backend for Toy {
    fn scheme(&self) -> &'static str {
        "toy"
    }

    fn examples(&self) -> &'static [&'static str] {
        &["toy:64K"]
    }

    fn parse(
        &self,
        location: &str,
        options: Options,
        _: Nested<'_>,
    ) -> Result<Arc<dyn VolumeSpec>> {
        options.finish("toy:", &[])?;
        Ok(Arc::new(ToySpec { size: parse_size(location)? }))
    }

    fn max_extra_open_time(&self) -> Duration {
        Duration::from_secs(7)
    }

    fn diagnose(&self) -> Option<Result<String>> {
        Some(Ok("toys need nothing".to_owned()))
    }
}

#[derive(Debug)]
struct ToySpec {
    size: u64,
}

impl VolumeSpec for ToySpec {
    fn scheme(&self) -> &'static str {
        "toy"
    }

    fn location(&self) -> String {
        Size(self.size).to_string()
    }

    fn open(&self, _: &OpenOptions) -> Result<Arc<dyn Image>> {
        let content = vec![0; usize::try_from(self.size).map_err(|_| invalid("too large"))?];
        Ok(Arc::new(ToyImage { content: Arc::new(Mutex::new(content)), token: Mutex::new(None) }))
    }

    fn open_successor(&self, _: &OpenOptions, _: HandoverFiles) -> Result<Arc<dyn Image>> {
        Err(Error::new(ErrorKind::Unsupported, "a toy cannot be handed over"))
    }

    fn confinement(&self) -> Confinement {
        Confinement::BeforeOpen {
            paths: vec!["/dev/null".into()],
            copies: Vec::new(),
            writable: Vec::new(),
            network: Network::None,
        }
    }

    fn fence(&self) -> Result<Option<Box<dyn Fence>>> {
        Ok(Some(Box::new(ToyFence)))
    }
}

struct ToyImage {
    content: Arc<Mutex<Vec<u8>>>,
    token: Mutex<Option<CredentialSet>>,
}

impl Image for ToyImage {
    fn size(&self) -> u64 {
        self.content.lock().unwrap().len() as u64
    }

    fn block_sizes(&self) -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 4096, maximum: 1 << 20 }
    }

    fn features(&self) -> Features {
        // Its memory is private, so an acknowledged write is lost with the process.
        Features { flush: true, keeps_acknowledged_writes: false, ..Features::default() }
    }

    fn identity(&self) -> VolumeIdentity {
        VolumeIdentity::new("a toy")
    }

    fn queue(&self, _: &mut Ring, _: &Completer) -> Result<Box<dyn ImageQueue>> {
        Ok(Box::new(ToyQueue(Arc::clone(&self.content))))
    }

    fn refresh_size(&self) -> Result<u64> {
        Ok(self.size())
    }

    fn renew_credentials(&self) -> Option<&dyn RenewCredentials> {
        Some(self)
    }
}

impl RenewCredentials for ToyImage {
    fn renew(&self, credentials: &CredentialSet) -> Result<()> {
        *self.token.lock().unwrap() = Some(credentials.clone());
        Ok(())
    }
}

struct ToyQueue(Arc<Mutex<Vec<u8>>>);

impl ImageQueue for ToyQueue {
    fn start(
        &mut self,
        _: RequestId,
        request: Request,
        mut buffer: Option<Buffer>,
        _: &mut Ring,
    ) -> Started {
        let mut content = self.0.lock().unwrap();
        let range = request.offset as usize..(request.offset + request.length) as usize;
        let result = match (request.op, &mut buffer) {
            (Op::Read, Some(buffer)) => {
                buffer.payload_mut().copy_from_slice(&content[range]);
                Ok(())
            }
            (Op::Write, Some(buffer)) => {
                content[range].copy_from_slice(buffer.payload());
                Ok(())
            }
            (Op::Flush, _) => Ok(()),
            _ => Err(IoError::Unsupported),
        };
        Started::Done(Outcome { result, buffer })
    }

    fn on_ring(&mut self, _: Completion, _: &mut Ring) -> Option<(RequestId, Outcome)> {
        None
    }
}

struct ToyFence;

impl Fence for ToyFence {
    fn clients(&self, _: Instant) -> Result<Vec<Client>> {
        Ok(vec![Client { address: "toy-1".to_owned(), holds_lock: true, ..Client::default() }])
    }

    fn targets(&self, _: Option<&str>, deadline: Instant) -> Result<Vec<Target>> {
        let target = |client| Target { client, consequence: "nothing is lost".to_owned() };
        Ok(self.clients(deadline)?.into_iter().map(target).collect())
    }

    fn fence(&self, _: &[Target], _: &Claimant, _: Instant) -> Result<()> {
        Ok(())
    }

    fn unfence(&self, _: &str, _: &Claimant, _: Instant) -> Result<bool> {
        Ok(false)
    }
}

#[test]
fn a_new_backend_needs_only_its_registration() {
    let uri = REGISTRY.volume("toy:65536").unwrap();
    assert_eq!((uri.to_string().as_str(), uri.default_name().as_str()), ("toy:64K", "toy-64K"));
    let refused = |text: &str| REGISTRY.volume(text).unwrap_err();
    assert!(refused("toy:64K?a=b").message().contains("toy: has no option \"a\""));
    assert!(refused("mem:1G").repair().unwrap().contains("toy:64K"), "it is in the examples");
    assert_eq!(REGISTRY.max_extra_open_time(), Duration::from_secs(7));
    let findings: Vec<_> = REGISTRY.backends().filter_map(|backend| backend.diagnose()).collect();
    assert_eq!(findings.len(), 1);
    let needs = cleat_worker::sandbox::Needs::from(&uri.spec().confinement());
    assert_eq!(needs.paths, [std::path::Path::new("/dev/null")]);

    let image = uri.open(&OpenOptions::default()).unwrap();
    let fixture = Fixture::new(Arc::clone(&image), Limits::default());
    let mut client = fixture.connect();
    client.write(1, 4096, &[7; 512]);
    client.expect(1, Ok(()));
    client.send(wire::FLUSH, 2, 0, 0);
    client.expect(2, Ok(()));
    client.send(wire::READ, 3, 4096, 512);
    client.expect(3, Ok(()));
    assert_eq!(client.take(512), [7; 512]);
}

#[test]
fn capabilities_of_a_new_backend_are_reached_by_type() {
    let uri = REGISTRY.volume("toy:64K").unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let fence = uri.fence().unwrap();
    let targets = fence.targets(None, deadline).unwrap();
    assert_eq!(targets[0].client.address, "toy-1");
    fence.fence(&targets, &Claimant::default(), deadline).unwrap();
    assert_eq!(uri.store_location().unwrap_err().kind(), ErrorKind::Unsupported);

    let image = uri.open(&OpenOptions::default()).unwrap();
    assert!(image.resize().is_none() && image.handover().is_none() && image.background().is_none());
    let mut secret: File = tempfile::tempfile().unwrap();
    secret.write_all(b"token").unwrap();
    secret.rewind().unwrap();
    let path = "/run/toy/token".to_owned();
    let file = CredentialFile {
        path: path.clone().into(),
        what: "token",
        option: "token",
        max_bytes: 64,
        is_followed: false,
        source: None,
    };
    let renewed = CredentialSet::receive(&[file], &[path], vec![secret.into()]).unwrap();
    image.renew_credentials().unwrap().renew(&renewed).unwrap();
}
