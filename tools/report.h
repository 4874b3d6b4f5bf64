// `sherd report`: a run, or several beside each other, as a page.
#pragma once

#include <string>
#include <vector>

#include "runtime/io/file_system.h"

namespace sherd::tools {

struct ReportOptions {
  std::vector<std::string> runs;  ///< their folders; curves of several lie over each other
  std::string out;                ///< the page's file; none: report.html in the first folder
};

/// What the files of these runs say, as an HTML document that is complete in itself: curves, figures,
/// settings and who owns what. The same text for the same files. ValueError for a folder that is no run's or
/// has no step yet; what is damaged beside that is left out, and the page says so.
std::string page(const std::vector<std::string>& runs, FileSystem& files);

/// Writes the page, which is complete or as it was before, and says where.
std::string report(const ReportOptions& options, FileSystem& files);

}  // namespace sherd::tools
