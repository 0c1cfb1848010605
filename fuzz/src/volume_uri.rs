//! URIs of volumes and of stores, as a user types them and as records contain them.

use cleat_backend::Registry;
use cleat_backend::uri::MAX_URI;

/// The backends of a release build.
const REGISTRY: Registry =
    Registry::new(&[cleat_backend::mem::BACKEND, cleat_backend::file::BACKEND, cleat_rbd::BACKEND]);

/// Checks that a URI that parses is printed in one form, which parses to the same URI, and that it has a
/// name that a mapping may have.
pub(crate) fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(uri) = REGISTRY.volume(text) {
        assert!(text.len() <= MAX_URI, "a URI of {} bytes was accepted", text.len());
        let printed = uri.to_string();
        if printed.len() <= MAX_URI {
            let again = REGISTRY.volume(&printed);
            let again = again.unwrap_or_else(|error| panic!("{printed:?}: {}", error.report()));
            assert_eq!(again.to_string(), printed, "the printed form is not final");
            assert_eq!(again.default_name(), uri.default_name());
        }
        let name = uri.default_name();
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        assert!((1..=128).contains(&name.len()) && name.bytes().all(plain), "{name:?}");
    }
    if let Ok(store) = REGISTRY.store(text) {
        let printed = store.to_string();
        if printed.len() <= MAX_URI {
            let again = REGISTRY.store(&printed);
            let again = again.unwrap_or_else(|error| panic!("{printed:?}: {}", error.report()));
            assert_eq!(again.to_string(), printed, "the printed form is not final");
        }
    }
}
