//! The files of one crate as modules, and which of them import each other.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{File, words};

/// A module's path inside its crate; empty for the crate's root.
type Module = Vec<String>;

/// A crate's modules that have a file of their own.
pub(crate) struct Crate {
    /// Each module with the code of its file, without comments, strings and tests.
    modules: BTreeMap<Module, String>,
}

impl Crate {
    /// The folder of the root file of the crate with this manifest: `src/core/` for
    /// `src/core/Cargo.toml`, `src/` for `Cargo.toml`.
    pub(crate) fn root_of(manifest: &str, files: &[File]) -> Option<String> {
        let folder = manifest.strip_suffix("Cargo.toml")?;
        [folder.to_owned(), format!("{folder}src/")]
            .into_iter()
            .find(|root| files.iter().any(|file| file.path == format!("{root}lib.rs")))
    }

    /// Reads the crate whose root file is in the folder `root`. A folder below it with a root file is
    /// another crate.
    pub(crate) fn read(root: &str, files: &[File]) -> Self {
        let inner: Vec<&str> = files
            .iter()
            .filter_map(|file| file.path.strip_suffix("lib.rs"))
            .filter(|folder| folder.len() > root.len() && folder.starts_with(root))
            .collect();
        let own = |file: &&File| {
            file.is_rust()
                && file.path.starts_with(root)
                && !inner.iter().any(|folder| file.path.starts_with(folder))
                && !["tests.rs", "build.rs", "main.rs"].iter().any(|end| file.path.ends_with(end))
        };
        let module = |file: &File| {
            let path = file.path[root.len()..].trim_end_matches(".rs");
            let path = path.trim_end_matches("/mod");
            path.split('/').filter(|part| *part != "lib").map(str::to_owned).collect()
        };
        Self { modules: files.iter().filter(own).map(|file| (module(file), file.code())).collect() }
    }

    /// The groups of modules that import each other in a circle. Imports between a module and the modules
    /// above or below it do not count.
    pub(crate) fn circles(&self) -> Vec<Vec<String>> {
        let reached: BTreeMap<&Module, BTreeSet<&Module>> =
            self.modules.keys().map(|module| (module, self.reached_from(module))).collect();
        let mut circles = BTreeSet::new();
        for (module, reaches) in &reached {
            let others = reaches.iter().filter(|other| reached[**other].contains(module));
            let circle: BTreeSet<String> = others.map(|other| other.join("::")).collect();
            if circle.len() > 1 {
                circles.insert(circle);
            }
        }
        circles.into_iter().map(|circle| circle.into_iter().collect()).collect()
    }

    fn reached_from(&self, start: &Module) -> BTreeSet<&Module> {
        let mut reached = BTreeSet::new();
        let mut waiting: Vec<&Module> = self.imports(start);
        while let Some(module) = waiting.pop() {
            if reached.insert(module) {
                waiting.extend(self.imports(module));
            }
        }
        reached
    }

    /// The modules that `module` names, without those above and below it.
    fn imports(&self, module: &Module) -> Vec<&Module> {
        let code = &self.modules[module];
        let mut named = Vec::new();
        for path in paths(code, module) {
            let Some(target) = self.target(&path) else { continue };
            let related = target.starts_with(module) || module.starts_with(target);
            if !related {
                named.push(target);
            }
        }
        named
    }

    /// The module of the item at `path`, with re-exports followed.
    fn target(&self, path: &[String]) -> Option<&Module> {
        let depth = (0..=path.len()).rev().find(|n| self.modules.contains_key(&path[..*n]))?;
        let (module, text) = self.modules.get_key_value(&path[..depth])?;
        let Some(item) = path.get(depth) else { return Some(module) };
        let from = reexported_from(text, item, module);
        let Some(from) = from.filter(|from| from.as_slice() != path) else { return Some(module) };
        self.target(&from)
    }
}

/// The full path of `item` if `code` re-exports it from another module with `pub use`.
fn reexported_from(code: &str, item: &str, module: &Module) -> Option<Vec<String>> {
    code.match_indices("pub").filter_map(|(at, _)| statement(&code[at..])).find_map(|tree| {
        let paths = flatten(tree, &[]);
        let path = paths.into_iter().find(|path| path.last().is_some_and(|last| last == item))?;
        absolute(&path, module).or_else(|| {
            let child = module.iter().chain(&path).cloned().collect();
            Some(child)
        })
    })
}

/// The text between `pub use` (or `pub(super) use`) and its semicolon.
fn statement(rest: &str) -> Option<&str> {
    let rest = rest.strip_prefix("pub")?.trim_start();
    let rest = match rest.strip_prefix('(') {
        Some(inside) => inside.split_once(')')?.1.trim_start(),
        None => rest,
    };
    let rest = rest.strip_prefix("use ")?;
    rest.split_once(';').map(|(tree, _)| tree)
}

/// The paths in `code`, the code of `module`, that begin with `crate` or `super`, from the crate's root.
fn paths(code: &str, module: &Module) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().last();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let tree = tree(&code[at..]);
            found.extend(flatten(tree, &[]).iter().filter_map(|path| absolute(path, module)));
        }
    }
    found
}

/// The path, with its groups in braces, that `code` begins with.
fn tree(code: &str) -> &str {
    let mut depth = 0_usize;
    let end = code.find(|c: char| {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => return true,
            '}' => depth -= 1,
            ' ' | '\n' | ',' => return depth == 0,
            _ => return depth == 0 && !(c.is_alphanumeric() || c == '_' || c == ':'),
        }
        false
    });
    end.map_or(code, |end| &code[..end])
}

/// The single paths of `a::{b, c::{d, e}}`.
fn flatten(tree: &str, prefix: &[String]) -> Vec<Vec<String>> {
    let Some((head, group)) = tree.split_once('{') else {
        let path: Vec<String> =
            prefix.iter().cloned().chain(words(tree).map(str::to_owned)).collect();
        return vec![path];
    };
    let prefix: Vec<String> =
        prefix.iter().cloned().chain(words(head).map(str::to_owned)).collect();
    let group = group.rsplit_once('}').map_or(group, |(inside, _)| inside);
    parts(group).into_iter().flat_map(|part| flatten(part.trim(), &prefix)).collect()
}

/// Splits `group` at the commas outside braces.
fn parts(group: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    let split = group.split(|c: char| {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    split.filter(|part| !part.trim().is_empty()).collect()
}

/// Makes `path` relative to the crate's root. `None` when it begins with none of `crate`, `super`, `self`.
fn absolute(path: &[String], module: &Module) -> Option<Vec<String>> {
    let above = path.iter().take_while(|part| *part == "super").count();
    let base = match path.first().map(String::as_str)? {
        "crate" => Vec::new(),
        "self" => module.clone(),
        "super" => module[..module.len().checked_sub(above)?].to_vec(),
        _ => return None,
    };
    let rest = path.iter().skip(above.max(1)).filter(|part| *part != "self").cloned();
    Some(base.into_iter().chain(rest).collect())
}

#[test]
fn circles_are_found_through_groups_and_reexports() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let files = [
        file("x/Cargo.toml", ""),
        file("x/lib.rs", "mod a;\nmod b;\nmod c;\npub use c::{Deep, Other};\n"),
        file("x/a.rs", "use super::{b::{self, B}};\n"),
        file("x/b.rs", "fn b() { crate::Deep::new() }\n"),
        file("x/c.rs", "mod d;\npub use d::Deep;\n"),
        file("x/c/d.rs", "use super::super::a::A;\nuse super::C;\n"),
        file("x/e.rs", "use crate::a; // use crate::f\n"),
        file("x/f.rs", "use crate::e::E;\n"),
    ];
    let root = Crate::root_of("x/Cargo.toml", &files).expect("it has a root file");
    assert_eq!(Crate::read(&root, &files).circles(), [["a", "b", "c::d"]]);
}
